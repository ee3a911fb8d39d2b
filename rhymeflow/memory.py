"""Estimates how much memory a configuration will take, from shapes; no weights are read.

Each part is a product of numbers from the configuration and the model's own config. Left out, since
it depends on libraries: Python and torch (about 0.5 GB per process), CUDA, NCCL and allocators
(about 2 GB per GPU), and on CPUs the copies of weights in the layout of their instructions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from rhymeflow.config import Config, DraftingConfig
from rhymeflow.engine.native.cache import STEP, capacity_for
from rhymeflow.engine.native.sampler import sampling_bytes
from rhymeflow.engine.vllm.supported import check_adapted
from rhymeflow.errors import UserError
from rhymeflow.histospec.drafter import Drafter
from rhymeflow.histospec.index import Index
from rhymeflow.learner.adamw_8bit import BLOCK
from rhymeflow.models import load, lora, nf4
from rhymeflow.models.adapter_files import adapter_for
from rhymeflow.models.attention import Shape
from rhymeflow.models.families import NOT_ATTENDING
from rhymeflow.models.precision import resolve_device
from rhymeflow.weights.base import SPARE_VERSIONS
from rhymeflow.weights.changes import MAX_LISTED

GB = 1e9
MASTER = 4
"""Bytes of a float32: the learner's weights, gradients and AdamW moments."""
ASSUMED_PROMPT = 512
"""Assumed tokens of the longest prompt, if it is taken from neither data nor configuration."""
ALLOCATOR = 1.25
"""Ratio of a process's memory to the memory in use, because of fragmentation: 1.2 to 1.3 in the
learner's steps on a CPU (`rhymeflow bench learner`)."""
PROCESS = 3_000_000_000
"""Main memory of a process that computes on a GPU: Python, torch, CUDA's libraries; estimated."""


class MemoryPart(NamedTuple):
    """A part of memory: its name and its bytes."""

    what: str
    num_bytes: float


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a model that determine its memory."""

    num_parameters: int
    num_outside: int  # parameters outside the layers: embeddings and head
    num_layers: int
    num_attending: int  # layers with keys and values
    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden_size: int
    intermediate_size: int  # of the MLP; with experts, of all that a token uses
    num_experts: int  # per layer; 0: the model is dense
    experts_per_token: int  # 0: the model is dense
    normalises_heads: bool  # whether queries and keys are normalised
    vocab_size: int
    max_positions: int
    reach: int  # positions that some layer's attention reaches back; 0: all
    dtype: torch.dtype  # the compute precision
    device: str
    num_adapter: int = 0  # parameters of the adapter; 0: all of the model's are trained
    narrow: int = 0  # values between the adapter's matrices, per token
    num_quantized: int = 0  # parameters of 4 bits, under the adapter

    @property
    def bytes_per_value(self) -> int:
        """Bytes of a value in the compute precision."""
        return self.dtype.itemsize

    @property
    def name_of_dtype(self) -> str:
        """The name of `dtype` in a configuration."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def weights(self) -> int:
        """Bytes of all weights in the compute precision."""
        whole = self.num_parameters + self.num_adapter - self.num_quantized
        return whole * self.bytes_per_value + round(self.num_quantized * nf4.BYTES)

    @property
    def num_trained(self) -> int:
        """Parameters that are trained and published."""
        return self.num_adapter or self.num_parameters

    @property
    def num_of_critic(self) -> int:
        """Parameters of a critic, which has one output in place of a head."""
        embeddings = self.vocab_size * self.hidden_size
        return self.num_parameters - self.num_outside + embeddings + self.hidden_size

    @property
    def version(self) -> int:
        """Bytes of what a version consists of, in the compute precision."""
        return self.num_trained * self.bytes_per_value

    @property
    def kv_token(self) -> int:
        """Bytes of one token in the KV cache."""
        return 2 * self.num_attending * self.num_kv_heads * self.head_size * self.bytes_per_value


def model_here(config: Config) -> ModelSize:
    """Return the model as this machine computes it; `UserError` if there is no such model."""
    device = resolve_device(config.model)
    dtype = load.resolve_dtype(config.model, device)
    size = model_of(load.load_config(config.model), dtype, str(device))
    return with_adapter(size, load.load_config(config.model), config)


def model_on_gpus(config: Config) -> ModelSize:
    """Return the model as GPUs compute it, with `model.dtype: auto` as bfloat16. Models that
    recipes name need no network. `UserError` if there is no such model."""
    dtype = torch.float32 if config.model.dtype == "float32" else torch.bfloat16
    size = model_of(load.architecture(config.model), dtype, "cuda")
    return with_adapter(size, load.architecture(config.model), config)


def with_adapter(model: ModelSize, hf_config: PreTrainedConfig, config: Config) -> ModelSize:
    """Return the sizes of the model with the configuration's adapter, if it has one. Raises
    `UserError` if it does not fit the model, or the engine does not compute it."""
    if (adapter := adapter_for(config.model)) is None:
        return model
    if config.rollout.engine == "vllm":
        check_adapted(config, hf_config)
    shapes = load.shapes_of(hf_config)
    small = lora.quantizable(shapes, adapter).values() if adapter.quantization else []
    num_quantized = sum(each.weight.numel() for each in small)
    adapted = lora.attach(shapes, adapter)
    own = sum(each.numel() for each in lora.versioned(adapted).values())
    layers = [each for each in adapted.modules() if isinstance(each, lora.LoraLinear)]
    narrow = adapter.rank * len(layers)
    return replace(model, num_adapter=own, narrow=narrow, num_quantized=num_quantized)


def model_of(hf_config: PreTrainedConfig, dtype: torch.dtype, device: str) -> ModelSize:
    """Return the sizes of a model in this precision on this device."""
    text_config = hf_config.get_text_config()

    def first_of(*names: str) -> int:
        """Return the first of these fields that is set, the largest of a list of all layers'
        (Hunyuan's mixtures); 0: none is."""
        found = next((value for name in names if (value := getattr(text_config, name, None))), 0)
        return max(found) if isinstance(found, list) else found

    shape, hidden = Shape.of(text_config), text_config.hidden_size
    kinds = getattr(text_config, "layer_types", None) or [""] * shape.layers
    experts_per_token = first_of("num_experts_per_tok", "top_k_experts")
    expert_size = experts_per_token * first_of("moe_intermediate_size", "intermediate_size")
    return ModelSize(
        num_parameters=load.count_parameters(hf_config),
        num_outside=text_config.vocab_size * hidden * (1 if hf_config.tie_word_embeddings else 2),
        num_layers=shape.layers,
        num_attending=sum(kind not in NOT_ATTENDING for kind in kinds),
        num_heads=text_config.num_attention_heads,
        num_kv_heads=shape.kv_heads,
        head_size=shape.head_dim,
        hidden_size=hidden,
        intermediate_size=expert_size or first_of("intermediate_size") or 4 * hidden,
        num_experts=first_of("num_experts", "num_local_experts"),
        experts_per_token=experts_per_token,
        normalises_heads=text_config.model_type.startswith("qwen3"),
        vocab_size=text_config.vocab_size,
        max_positions=text_config.max_position_embeddings,
        reach=shape.reach.window or shape.reach.chunk or 0,
        dtype=dtype,
        device=device,
    )


# -- a pass of the learner -------------------------------------------------------------------------
# Checked on GPUs' shapes by `tests/gpu_paths/test_shapes.py`, on CPUs by `tests/test_memory.py`.


def layer_bytes(model: ModelSize) -> int:
    """Return the bytes that one layer keeps per token for its backward pass.

    A norm keeps its input in float32, the normalised input if its weight is trained, and its
    output; each linear layer its input; attention its queries, keys, values and output, on GPUs
    also as put back into the row; the MLP its gate before and after the activation, the other
    factor, and the product; experts, for each that the token uses, the token as it came and as it
    leaves, and all their probabilities. Attention is FlashAttention or as frugal.
    """
    size, queries = model.bytes_per_value, model.num_heads * model.head_size
    keys = model.num_kv_heads * model.head_size
    of_weight = 0 if model.num_adapter else size
    norms = 2 * model.hidden_size * (MASTER + of_weight + size)
    if model.normalises_heads:
        norms += (queries + keys) * (MASTER + of_weight)
    attention = size * (2 * (queries + keys) + (0 if model.device == "cpu" else queries))
    routed = size * 2 * model.experts_per_token * model.hidden_size + MASTER * model.num_experts
    routed += size * model.narrow // model.num_layers
    return norms + attention + size * 4 * model.intermediate_size + routed


def in_backward(model: ModelSize) -> int:
    """Return the bytes per token of gradients in one layer's backward pass: of the hidden state
    and of the MLP's four values, or of three copies of the token for each expert that it uses."""
    routed = 3 * model.experts_per_token * model.hidden_size
    of_mlp = max(4 * model.intermediate_size, routed)
    return model.bytes_per_value * (4 * model.hidden_size + of_mlp)


def head_bytes(config: Config, model: ModelSize) -> int:
    """Return the bytes of a chunk of logits, and on GPUs of the head's gradient.

    A chunk has logits, log-probabilities and probabilities; with a temperature or top-k also what
    the logits were before, and for top-p they are sorted. CPUs take so few rows at a time that the
    rest does not count, but the head's weight in float32.
    """
    learner, rollout = config.learner, config.rollout
    logits = learner.logits_chunk_size * model.vocab_size * MASTER
    taught = 0
    if learner.distillation.is_divergence:  # the teacher's logits, and before the temperature
        taught = logits * (1 if rollout.temperature == 1.0 else 2)
    if model.device == "cpu":
        is_copied = model.bytes_per_value != MASTER  # the head computes in float32
        return logits + taught + is_copied * MASTER * model.vocab_size * model.hidden_size
    copies = 3 if rollout.temperature in (0.0, 1.0) and not rollout.top_k else 4
    if rollout.top_p < 1.0:
        copies = 6
    is_summed = learner.num_ranks > 1 and model.bytes_per_value != MASTER  # over chunks, in float32
    per_weight = model.bytes_per_value + (MASTER if is_summed else 0)
    if model.num_adapter:  # the head is not trained
        per_weight = 0
    return taught + copies * logits + per_weight * model.vocab_size * model.hidden_size


def of_pass(config: Config, model: ModelSize, tokens: int) -> list[MemoryPart]:
    """Return what the pass over a micro-batch keeps for its backward pass, and the larger of what
    the head takes, when all is kept, and then one layer's backward pass."""
    layer, computing = layer_bytes(model), in_backward(model)
    if config.learner.gradient_checkpointing:
        layer, computing = model.bytes_per_value * model.hidden_size, layer + computing
    overhead = ALLOCATOR if model.device == "cpu" else 1
    head, one_layer = head_bytes(config, model), overhead * tokens * computing
    rows = f"logits, {config.learner.logits_chunk_size:,} rows x {model.vocab_size:,}"
    return [
        MemoryPart(
            f"activations of {tokens:,} tokens, at most",
            overhead * tokens * model.num_layers * layer,
        ),
        MemoryPart(
            rows if head > one_layer else "backward pass of one layer", max(head, one_layer)
        ),
    ]


def microbatch_tokens(config: Config, longest_prompt: int, length: int) -> int:
    """Return the most tokens of a micro-batch, which holds each group's prompt once and sequences
    of `length`."""
    learner = config.learner
    groups = -(-learner.groups_per_batch // (learner.num_minibatches * learner.num_ranks))
    response = length - longest_prompt
    most = groups * (longest_prompt + config.rollout.num_generations * response)
    return max(length, min(most, learner.max_tokens_per_microbatch))


# -- memory of each process ------------------------------------------------------------------------
# `longest_prompt` is in tokens.


def longest(config: Config, model: ModelSize, longest_prompt: int) -> int:
    """Return the most tokens of a prompt and its response."""
    rollout = config.rollout
    limit = rollout.vllm_max_model_length if rollout.engine == "vllm" else None
    return min(limit or model.max_positions, longest_prompt + rollout.max_completion_length)


def of_optimizer(config: Config, model: ModelSize) -> list[MemoryPart]:
    """Return a rank's share of the float32 weights, gradients and moments."""
    count = config.learner.num_ranks
    masters, share = model.num_trained * MASTER / count, "" if count == 1 else f", 1/{count}"
    num_outside = 0 if model.num_adapter else model.num_outside
    what, moments = _moments(config, model.num_trained, num_outside)
    parts = [
        MemoryPart(f"master weights (float32){share}", masters),
        MemoryPart(f"gradients (float32){share}", masters),
        MemoryPart(f"{what}{share}", moments / count),
    ]
    if config.learner.has_critic:
        _, moments = _moments(config, model.num_of_critic, model.vocab_size * model.hidden_size)
        num_bytes = (2 * model.num_of_critic * MASTER + moments) / count
        parts.append(MemoryPart(f"critic: masters, gradients, moments{share}", num_bytes))
    return parts


def _moments(config: Config, trained: int, num_outside: int) -> tuple[str, int]:
    """Return the name and bytes of the moments of `trained` parameters, so many outside layers."""
    if config.learner.optimizer == "adamw_8bit":  # and a scale for each of a block
        return "AdamW moments (2 x 8 bits)", 2 * trained + 2 * trained * MASTER // BLOCK
    if config.learner.optimizer == "muon":
        return "Muon moments (float32)", (trained + num_outside) * MASTER
    return "AdamW moments (2 x float32)", 2 * trained * MASTER


def of_rank(config: Config, model: ModelSize, longest_prompt: int) -> list[MemoryPart]:
    """Return the memory of a rank besides `of_optimizer`."""
    length = longest(config, model, longest_prompt)
    tokens = microbatch_tokens(config, min(longest_prompt, length), length)
    return [*between_steps(config, model), *of_pass(config, model, tokens)]


def between_steps(config: Config, model: ModelSize) -> list[MemoryPart]:
    """Return what a rank keeps between steps besides `of_optimizer`, and what it gathers."""
    learner, parts = config.learner, []
    if learner.num_ranks > 1:
        # Two layers, since the next is gathered while one computes; each with its gradient.
        layers = 2 * (model.num_parameters - model.num_outside) / model.num_layers
        gathered = (model.num_outside + layers) * model.bytes_per_value
        if model.num_adapter:  # what is under it has no gradient
            base = model.num_parameters * model.bytes_per_value / learner.num_ranks
            share = f"({model.name_of_dtype}), 1/{learner.num_ranks}"
            parts.append(MemoryPart(f"weights under the adapter {share}", base))
        else:
            gathered *= 2
        parts.append(MemoryPart("gathered: embeddings, head and two layers", gathered))
    elif model.bytes_per_value != MASTER or model.num_adapter:
        small = ", nf4" if model.num_quantized else ""
        parts.append(MemoryPart(f"weights ({model.name_of_dtype}{small})", model.weights))
        if learner.has_critic:
            num_bytes = model.num_of_critic * model.bytes_per_value
            parts.append(MemoryPart(f"critic's weights ({model.name_of_dtype})", num_bytes))
    if learner.needs_start and config.model.lora.adapter is not None:
        parts.append(MemoryPart("reference: the adapter at the start", model.version))
    elif learner.needs_start and not model.num_adapter:
        sharded = model.num_parameters * MASTER / learner.num_ranks
        size = sharded if learner.num_ranks > 1 else model.weights
        parts.append(MemoryPart("reference model", size))
    if (chosen := config.teacher_model) is not None:
        teacher = model_of(load.architecture(chosen), model.dtype, model.device)
        size = teacher.weights
        if learner.num_ranks > 1:  # with the divergence, the embeddings and the head stand too
            size = teacher.num_parameters * MASTER / learner.num_ranks
            size += teacher.num_outside * model.bytes_per_value
        parts.append(MemoryPart("teacher", size))
    return parts


def kv_tokens(config: Config, model: ModelSize, longest_prompt: int) -> int:
    """Return the most tokens in an instance's KV cache; below 0: its weights alone are too large.

    vLLM takes `vllm_gpu_memory_utilization` of each of its GPUs, and uses what the weights leave of
    that as KV cache. The simulator's profiles have the same capacity.
    """
    rollout = config.rollout
    if rollout.engine == "native" or model.device == "cpu":  # grows on demand
        length = longest(config, model, longest_prompt)
        if rollout.engine == "native" and model.reach:
            # A full slot gives back what is out of reach; vLLM does so on its own terms.
            length = min(length, capacity_for(model.reach + STEP))
        return rollout.max_num_seqs * length
    gpus = config.cluster.gpu_memory_gb * GB * rollout.vllm_tensor_parallel_size
    return int((rollout.memory_share * gpus - model.weights) // model.kv_token)


def of_instance(config: Config, model: ModelSize, longest_prompt: int) -> list[MemoryPart]:
    """Return an instance's memory on each of its GPUs or, on CPUs, in each of its processes."""
    rollout, count = config.rollout, config.rollout.vllm_tensor_parallel_size
    share = "" if count == 1 else f", 1/{count}"
    tokens = max(0, kv_tokens(config, model, longest_prompt))
    cache = MemoryPart(f"KV cache, at most {tokens:,} tokens", tokens * model.kv_token / count)
    if rollout.engine == "vllm" and model.device == "cpu":
        cache = MemoryPart("KV cache (vllm_kv_cache_gb)", rollout.vllm_kv_cache_gb * GB / count)
    parts = [MemoryPart(f"weights{share}", model.weights / count), cache]
    if model.device != "cpu":
        return [*parts, _sampling(config, model)]
    if model.num_quantized:
        whole = model.num_quantized * model.bytes_per_value
        parts.insert(1, MemoryPart("weights of 4 bits made whole", whole))
    return parts


def _sampling(config: Config, model: ModelSize) -> MemoryPart:
    """Estimate an iteration in which all sequences sample, with a draft each. vLLM leaves no room
    for drafts: it reckons with its own sampler, before ours is put in."""
    rollout, drafting = config.rollout, config.drafting
    rows = rollout.max_num_seqs * (1 if drafting.window == "off" else 1 + drafting.max_draft)
    truncates = bool(rollout.top_k) or rollout.top_p < 1.0
    num_bytes = sampling_bytes(rows, model.vocab_size, MASTER, truncates=truncates)
    return MemoryPart(f"sampling, {rows:,} rows x {model.vocab_size:,}", num_bytes)


def of_changes(config: Config, model: ModelSize) -> list[MemoryPart]:
    """Return what `weights.transport = delta` keeps; a changed value takes twice its bytes."""
    if config.weights.transport != "delta":
        return []
    versions = config.schedule.bound + SPARE_VERSIONS
    num_bytes = versions * 2 * MAX_LISTED * model.version
    return [MemoryPart(f"changes to {versions} versions, at most", num_bytes)]


def of_history(drafting: DraftingConfig) -> list[MemoryPart]:
    """Return the history index; `UserError` if no machine could hold it."""
    if drafting.window == "off":
        return []
    tokens = drafting.history_tokens
    with _sized(f"drafting.history_tokens = {tokens:,}"):
        index = Index(max_tokens=tokens, max_responses=drafting.history_responses)
    return [MemoryPart(f"history index of {tokens:,} tokens", index.num_bytes)]


def of_drafter(config: Config, model: ModelSize) -> list[MemoryPart]:
    """Return an instance's index of running sequences; `UserError` if no machine could hold it."""
    drafting, sequences = config.drafting, config.rollout.max_num_seqs
    if drafting.window == "off":
        return []
    with _sized(f"rollout.max_num_seqs = {sequences:,}"):
        drafter = Drafter(None, drafting, max_sequences=sequences, max_length=model.max_positions)
    return [MemoryPart("index of running sequences", drafter.num_bytes)]


@contextmanager
def _sized(what: str) -> Iterator[None]:
    """Raise `UserError` for a failed allocation. An index takes no memory until it is written."""
    try:
        yield
    except (MemoryError, ValueError) as error:  # NumPy raises either, by the size
        raise UserError(f"{what}: no memory for the index of drafts: {error}") from None


def here(config: Config, model: ModelSize, longest_prompt: int) -> list[tuple[str, MemoryPart]]:
    """Return (processes, part) of a run on this machine, with processes of one kind summed."""
    instances, ranks = config.rollout.num_instances, config.learner.num_ranks
    processes = instances * config.rollout.vllm_tensor_parallel_size
    kinds = [
        ("weight store", 1, [MemoryPart("weights, two slots in shared memory", 2 * model.version)]),
        ("rollout", processes, of_instance(config, model, longest_prompt)),
        ("learner", ranks, [*of_optimizer(config, model), *of_rank(config, model, longest_prompt)]),
        ("weight store", 1, of_changes(config, model)),
        ("history", 1, of_history(config.drafting)),
        ("rollout", instances, of_drafter(config, model)),
    ]
    return [
        (name if count == 1 else f"{count} x {name}", MemoryPart(part.what, count * part.num_bytes))
        for name, count, parts in kinds
        for part in parts
    ]


def shared(config: Config, model: ModelSize) -> float:
    """Return the bytes of this machine's shared memory that a run takes: weights and history."""
    return 2 * model.version + total(of_history(config.drafting))


def total(parts: Iterable[MemoryPart]) -> float:
    """Return the sum in bytes."""
    return sum(part.num_bytes for part in parts)
