"""How much memory a configuration will take, worked out from shapes; no weights are read.

Holds true: each row is a product of numbers that the configuration, the model's own config and the
longest prompt give; neither weights nor a tokenizer are loaded. What the learner keeps of a
micro-batch is counted for layers of attention and a gated MLP. Left out, because they depend on
libraries: Python and torch themselves (about 0.5 GB a process), and on CPUs the copies of weights
that are laid out for its instructions (the head's is float32, in engine and learner).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from rhymeflow.config import Config
from rhymeflow.errors import UserError
from rhymeflow.histospec.drafter import Drafter
from rhymeflow.histospec.index import Index
from rhymeflow.models.load import (
    count_parameters,
    load_config,
    resolve_device,
    resolve_dtype,
)
from rhymeflow.utils.cores import cores_of_ranks
from rhymeflow.weights.changes import MOST
from rhymeflow.weights.stores import SPARE_VERSIONS

MASTER = 4
"""Bytes of a float32: the learner's weights, gradients and AdamW moments."""

ASSUMED_PROMPT = 512
"""Tokens of the longest prompt, if neither the data nor `data.max_prompt_length` is asked."""


ALLOCATOR = 1.25
"""What a process takes from the system over what is in use: arrays of other sizes fit badly into
those that were freed. 1.2 to 1.3 in the learner's steps (`rhymeflow bench learner`)."""


@dataclass(frozen=True)
class Model:
    """What of a model decides about memory."""

    num_parameters: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_positions: int
    bytes_per_value: int
    """Of the compute precision."""
    name_of_dtype: str
    device: str
    num_outside: int = 0
    """Parameters outside the layers: embeddings and head."""
    hidden_size: int = 0
    num_heads: int = 0
    intermediate_size: int = 0
    """Of the MLP; of experts, all that a token goes to."""


@dataclass(frozen=True)
class Row:
    """Memory of one kind in one process."""

    process: str
    what: str
    num_bytes: int


def describe(config: Config, longest_prompt: int | None = None) -> str:
    """Return sizes, memory and placement as lines that start with `#`.

    `longest_prompt`: in tokens, if the data was read.

    Raises:
        UserError: the model is not there, or its device is not.
    """
    model = shape(config)
    length = longest_prompt or config.data.max_prompt_length or ASSUMED_PROMPT
    rows = estimate(config, model, length)
    batch = config.learner.groups_per_batch * config.rollout.num_generations
    lines = [
        f"# {config.model.name}: {model.num_parameters:,} parameters, computed in "
        f"{model.name_of_dtype} on {model.device}",
        f"# {config.learner.max_steps} steps of {batch} trajectories "
        f"({config.learner.groups_per_batch} prompts x {config.rollout.num_generations})",
        f"# prompts of up to {length:,} tokens, {_origin(config, longest_prompt)}",
        "# workers:",
        *(f"#   {name:<18} {place}" for name, place in placement(config, model.device)),
        "# memory:",
    ]
    lines += [f"#   {row.process:<18} {row.what:<44} {size_text(row.num_bytes):>9}" for row in rows]
    lines.append(f"#   {'total':<63} {size_text(sum(row.num_bytes for row in rows)):>9}")
    lines.append("#   besides: about 0.5 GB for Python and torch in each process")
    return "\n".join(lines)


def _origin(config: Config, longest_prompt: int | None) -> str:
    if longest_prompt is not None:
        return "as the data has them"
    if config.data.max_prompt_length is not None:
        return "by data.max_prompt_length"
    return "an assumption (data.max_prompt_length says otherwise)"


def placement(config: Config, device: str) -> list[tuple[str, str]]:
    """Return each process that computes, with its device, threads and cores."""
    rollout, learner = config.rollout, config.learner
    share = max(1, len(os.sched_getaffinity(0)) // (learner.num_ranks + rollout.num_instances))
    cores = rollout.cpus or (None,) * rollout.num_instances
    ranks = cores_of_ranks(learner.cpus, learner.num_ranks)
    names = ["learner", *(f"learner rank {rank}" for rank in range(1, learner.num_ranks))]
    workers = [(n, learner.num_threads, own) for n, own in zip(names, ranks, strict=True)]
    workers += [(f"rollout-{n}", rollout.num_threads, each) for n, each in enumerate(cores)]
    found = []
    for name, threads, cpus in workers:
        count = threads or (len(cpus) if cpus else share)
        pinned = f", pinned to cores {', '.join(map(str, cpus))}" if cpus else ""
        found.append((name, f"{device}, {count} thread{'s' * (count != 1)}{pinned}"))
    reward = f"cpu, {config.reward.num_workers} process{'es' * (config.reward.num_workers != 1)}"
    found.append(("reward functions", reward))
    if config.drafting.window != "off":
        found.append(("history", "cpu, 1 thread"))
    return found


def shape(config: Config) -> Model:
    """Read the model's config (no weights). Raises `UserError` if there is no such model."""
    hf_config = load_config(config.model)
    device = resolve_device(config.model)
    dtype = resolve_dtype(config.model, device)
    return model_of(hf_config, dtype, str(device))


def model_of(hf_config: PreTrainedConfig, dtype: torch.dtype, device: str) -> Model:
    """A model of this kind, computed in this precision there."""
    text = hf_config.get_text_config()
    heads = text.num_attention_heads
    return Model(
        num_parameters=count_parameters(hf_config),
        num_layers=text.num_hidden_layers,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab_size=text.vocab_size,
        max_positions=text.max_position_embeddings,
        bytes_per_value=dtype.itemsize,
        name_of_dtype=str(dtype).removeprefix("torch."),
        device=device,
        num_outside=text.vocab_size
        * text.hidden_size
        * (1 if hf_config.tie_word_embeddings else 2),
        hidden_size=text.hidden_size,
        num_heads=heads,
        intermediate_size=_intermediate_size(text),
    )


def _intermediate_size(text: PreTrainedConfig) -> int:
    experts = getattr(text, "num_experts_per_tok", None)
    of_expert = getattr(text, "moe_intermediate_size", None)
    if experts and of_expert:
        return int(experts * of_expert)
    return int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size)


def activation_bytes(model: Model, *, gradient_checkpointing: bool) -> int:
    """What a layer-by-layer pass keeps of one token for its backward pass, and computes with.

    Each linear layer keeps its input, attention its queries, keys, values and output; a norm its
    input, where it is torch's also that in float32 and the normalised; the gated MLP what it
    multiplies.
    """
    size, is_fused = (
        model.bytes_per_value,
        model.bytes_per_value == MASTER and model.device == "cpu",
    )
    norm = (0 if is_fused else MASTER) + 2 * size
    attention = 2 * (model.num_heads + model.num_kv_heads) * model.head_size
    mlp = (3 if is_fused else 4) * model.intermediate_size
    layer = 2 * norm * model.hidden_size + size * (attention + mlp)
    in_backward = size * (4 * model.hidden_size + 3 * model.intermediate_size)
    if gradient_checkpointing:
        return model.num_layers * size * model.hidden_size + layer + in_backward
    return model.num_layers * layer + in_backward


def _changes(config: Config, weights: int) -> list[Row]:
    """What `weights.transport = delta` keeps; a listed change takes twice the bytes it is of."""
    if config.weights.transport != "delta":
        return []
    versions = config.schedule.bound + SPARE_VERSIONS
    what = f"changes to {versions} versions, at most"
    return [Row("weight store", what, round(versions * 2 * MOST * weights))]


def estimate(config: Config, model: Model, prompt_length: int) -> list[Row]:
    """Return the rows, process by process, for prompts of at most `prompt_length` tokens."""
    rollout = config.rollout
    weights = model.num_parameters * model.bytes_per_value
    length = min(model.max_positions, prompt_length + rollout.max_completion_length)
    kv_token = 2 * model.num_layers * model.num_kv_heads * model.head_size * model.bytes_per_value
    instances = "rollout" if rollout.num_instances == 1 else f"{rollout.num_instances} x rollout"
    cached = f"KV cache, at most {rollout.max_num_seqs} x {length:,} tokens"
    cache = rollout.max_num_seqs * length * kv_token
    if rollout.engine == "vllm" and model.device == "cpu":
        cached, cache = "KV cache (vllm_kv_cache_gb)", int(rollout.vllm_kv_cache_gb * 1e9)
    rows = [
        Row("weight store", "weights, two slots in shared memory", 2 * weights),
        Row(instances, "weights", weights * rollout.num_instances),
        Row(instances, cached, cache * rollout.num_instances),
        *_learner(config, model, min(prompt_length, length), length),
        *_changes(config, weights),
    ]
    if config.drafting.window != "off":
        rows += _drafting(config, instances, model.max_positions)
    return rows


def _learner(config: Config, model: Model, prompt: int, length: int) -> list[Row]:
    """All ranks together; they share what is in float32.

    `prompt` and `length`: tokens of the longest prompt, and of that and the longest response.
    """
    learner, ranks = config.learner, config.learner.num_ranks
    weights = model.num_parameters * model.bytes_per_value
    masters = model.num_parameters * MASTER
    name, part = ("learner", "") if ranks == 1 else (f"{ranks} x learner", f", 1/{ranks} each")
    rows = [
        Row(name, f"master weights (float32){part}", masters),
        Row(name, f"gradients (float32){part}", masters),
        Row(name, f"AdamW moments (2 x float32){part}", 2 * masters),
        Row(
            name,
            f"logits, {learner.logits_chunk_size:,} rows x {model.vocab_size:,} at a time",
            learner.logits_chunk_size * model.vocab_size * MASTER * ranks,
        ),
        _activations(config, model, name, prompt, length),
    ]
    if ranks > 1:
        # Two layers, for the next is gathered while one computes; each with its gradient.
        layers = 2 * (model.num_parameters - model.num_outside) // model.num_layers
        gathered = 2 * (model.num_outside + layers) * model.bytes_per_value
        rows.append(Row(name, "gathered: embeddings, head and two layers", gathered * ranks))
        if learner.beta > 0:
            rows.append(Row(name, f"reference model (float32){part}", masters))
        return rows
    if model.bytes_per_value != MASTER:
        rows.insert(0, Row(name, f"weights ({model.name_of_dtype})", weights))
    if learner.beta > 0:
        rows.append(Row(name, "reference model", weights))
    return rows


def _activations(config: Config, model: Model, name: str, prompt: int, length: int) -> Row:
    """A group's prompt is there once in a micro-batch."""
    learner = config.learner
    groups = -(-learner.groups_per_batch // (learner.num_minibatches * learner.num_ranks))
    most = groups * (prompt + config.rollout.num_generations * (length - prompt))
    tokens = max(length, min(most, learner.max_tokens_per_microbatch))
    token = activation_bytes(model, gradient_checkpointing=learner.gradient_checkpointing)
    what = f"activations of {tokens:,} tokens, at most"
    return Row(name, what, round(ALLOCATOR * tokens * token) * learner.num_ranks)


def _drafting(config: Config, instances: str, max_length: int) -> list[Row]:
    """The indexes that drafts come from; making one to ask takes no memory until it is written."""
    drafting, rollout = config.drafting, config.rollout
    try:
        history = Index(
            max_tokens=drafting.history_tokens, max_responses=drafting.history_responses
        )
        drafter = Drafter(
            None,
            window=drafting.window,
            max_draft=drafting.max_draft,
            shape=drafting.shape,
            ranking=drafting.ranking,
            max_sequences=rollout.max_num_seqs,
            max_length=max_length,
        )
    except (MemoryError, ValueError) as error:  # NumPy raises either, by the size
        raise UserError(
            f"drafting.history_tokens = {drafting.history_tokens:,}, rollout.max_num_seqs = "
            f"{rollout.max_num_seqs:,}: no memory for the indexes of drafts: {error}"
        ) from None
    return [
        Row(
            "history",
            f"index of {drafting.history_tokens:,} tokens in shared memory",
            history.num_bytes,
        ),
        Row(instances, "index of what runs", drafter.num_bytes * rollout.num_instances),
    ]


def size_text(num_bytes: float) -> str:
    """As people read it."""
    if num_bytes < 1e9:
        return f"{num_bytes / 1e6:.1f} MB"
    return f"{num_bytes / 1e9:.2f} GB"
