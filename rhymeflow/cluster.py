"""Plans a run on the machines of section `cluster`: refuses it, or describes it node by node.

Starts nothing. The plan places workers on GPUs by `placement.py`, and estimates memory by
`memory.py` (docs/cluster.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from rhymeflow import build, emulation, memory, placement
from rhymeflow.config import Config
from rhymeflow.errors import UserError
from rhymeflow.memory import GB, MemoryPart, ModelSize, total
from rhymeflow.models.frozen_base import PARTS
from rhymeflow.placement import Node
from rhymeflow.profiles import Profile
from rhymeflow.utils.disk import size_text

TOKEN_BYTES = 10
"""Bytes in the store per generated token: eight for the token and its log-probability
(docs/run-directory.md), the rest for events, estimated for responses of some thousand tokens."""
TOKEN_DETAIL_BYTES = 6
"""Further bytes per token with `run.token_details`."""
_DAY = 86_400  # seconds


def describe(config: Config) -> str:
    """Return the plan as lines that start with `#`.

    Raises:
        UserError: the run is not possible as configured, or does not fit.
    """
    config = placement.with_memory_share(config, config.cluster.gpus_per_node)
    if config.rollout.vllm_sleeps and not _shares_gpu(config):
        raise UserError(
            "rollout.vllm_sleeps: learner and engines share no GPU, since cluster.gpus_per_node = "
            f"{config.cluster.gpus_per_node}, or one of them takes several"
        )
    model, nodes = model_of(config), placement.place(config)
    rank, instance = of_rank(config, model), memory.of_instance(config, model, max_prompt(config))
    _check_gpus(config, model, rank, instance)
    for node in nodes:
        _check_node(config, model, node)
    lines = [*_head(config, model), *_nodes(config, model, nodes)]
    owner = "the learner" if config.learner.num_ranks == 1 else "each rank"
    lines += _table(f"GPU memory of {owner}", rank)
    owner = "the instance" if _shares_gpu(config) else "each instance, on each of its GPUs"
    lines += _table(f"GPU memory of {owner}", instance)
    try:
        config = build.with_cost_model(config)
    except UserError as unknown:
        lines.append(f"the most tokens per second are not known: {unknown}")
    else:
        lines += _rates(config, model)
    return "\n".join(f"# {line}".rstrip() for line in lines)


def _shares_gpu(config: Config) -> bool:
    """Whether learner and engine share a GPU."""
    return placement.shares_gpu(config, config.cluster.gpus_per_node)


def model_of(config: Config) -> ModelSize:
    """Return the model's sizes. Raises `UserError` if an instance's GPUs cannot split the model."""
    model, num_gpus = memory.model_on_gpus(config), config.rollout.vllm_tensor_parallel_size
    if model.num_heads % num_gpus or model.num_kv_heads % num_gpus:
        raise UserError(
            f"rollout.vllm_tensor_parallel_size = {num_gpus} does not divide the "
            f"{model.num_heads} attention heads and {model.num_kv_heads} KV heads of "
            f"{config.model.name}"
        )
    return model


def adapted(profile: Profile, config: Config) -> Profile:
    """Return the profile with the costs of the configuration's adapter, if it has one.

    Of the six operations on a weight for each token, one without a gradient takes four. The
    optimizer's traffic, and what is published and pulled, are the adapter's; learner and engine
    also hash a part of the weights under it.
    """
    if not config.model.lora.is_used or profile.of_adapter:
        return profile
    model = memory.model_on_gpus(config)
    share = model.num_adapter / model.num_parameters
    train_token = (4 / 6 + share) * profile.train_token
    return replace(
        profile,
        of_adapter=True,
        train_token=train_token,
        measure_token=min(profile.measure_token, train_token),
        train_step=share * profile.train_step,
        push=(share + 1 / PARTS) * profile.push,
        pull=(share + 1 / PARTS) * profile.pull,
    )


def max_prompt(config: Config) -> int:
    """Return the length of the longest prompt, in tokens, that the plan assumes."""
    return config.data.max_prompt_length or config.simulation.workload.prompt_tokens


def of_rank(config: Config, model: ModelSize) -> list[MemoryPart]:
    """Return the memory of one rank on its GPU."""
    return [*_of_optimizer(config, model), *memory.of_rank(config, model, max_prompt(config))]


def _of_optimizer(config: Config, model: ModelSize) -> list[MemoryPart]:
    return [] if config.learner.offload_optimizer else memory.of_optimizer(config, model)


def of_node(config: Config, model: ModelSize, node: Node) -> list[MemoryPart]:
    """Return the main memory that a node's workers take."""
    workers = len(node.ranks) + config.rollout.vllm_tensor_parallel_size * len(node.instances)
    if not workers:
        return []
    parts = [
        MemoryPart(f"{workers} processes (estimate)", workers * memory.PROCESS),
        MemoryPart("weights staged, two versions", 2 * model.version),
        *memory.of_changes(config, model),
    ]
    whole = len(node.instances) * config.rollout.vllm_tensor_parallel_size * model.weights
    if model.num_adapter and config.rollout.engine == "vllm" and node.instances:
        parts.append(MemoryPart("weights as instances read them at their start", whole))
    elif config.rollout.vllm_sleeps:
        parts.append(MemoryPart("weights of instances that sleep", whole))
    if node.ranks and not config.learner.offload_optimizer:
        leaving = model.version * len(node.ranks) // config.learner.num_ranks
        parts.append(MemoryPart("weights on their way from the ranks' GPUs", leaving))
    if config.learner.offload_optimizer and node.ranks:
        offloaded = len(node.ranks) * total(memory.of_optimizer(config, model))
        parts.append(MemoryPart("master weights, gradients, moments", offloaded))
    return parts + (memory.of_history(config.drafting) if node.instances else [])


def _check_gpus(
    config: Config, model: ModelSize, rank: Sequence[MemoryPart], instance: Sequence[MemoryPart]
) -> None:
    rollout, gpu_gb = config.rollout, config.cluster.gpu_memory_gb
    longest = memory.longest(config, model, max_prompt(config))
    capacity = memory.kv_tokens(config, model, max_prompt(config))
    if capacity < longest:
        raise UserError(
            f"rollout.vllm_gpu_memory_utilization = {rollout.memory_share:g} of "
            f"cluster.gpu_memory_gb = {gpu_gb:g} on {rollout.vllm_tensor_parallel_size} GPUs: "
            f"beside weights of {size_text(model.weights)} the KV cache would hold "
            f"{max(0, capacity):,} tokens, and one prompt and response may have {longest:,}"
        )
    _check_sequence(config, model, longest)
    needed, who, advice = total(rank), "a rank takes", ""
    if _shares_gpu(config):
        engines, who = rollout.num_instances * total(instance), "learner and engine take"
        between = [*_of_optimizer(config, model), *memory.between_steps(config, model)]
        in_turns = max(needed, total(between) + engines)
        if rollout.engine == "vllm" and in_turns <= gpu_gb * GB:
            advice = "; rollout.vllm_sleeps = true, under schedule.name = 'synchronous', fits"
        needed = in_turns if rollout.vllm_sleeps else needed + engines
    elif rollout.engine == "native" and total(instance) > gpu_gb * GB:
        raise UserError(
            f"rollout.max_num_seqs = {rollout.max_num_seqs}: an instance needs "
            f"{size_text(total(instance))}, more than cluster.gpu_memory_gb = {gpu_gb:g}"
        )
    if needed > gpu_gb * GB:
        largest = max(rank, key=lambda part: part.num_bytes)
        raise UserError(
            f"learner.num_ranks = {config.learner.num_ranks}: {who} {size_text(needed)}, "
            f"{size_text(largest.num_bytes)} of it {largest.what}: more than "
            f"cluster.gpu_memory_gb = {gpu_gb:g}{advice}"
        )


def _check_sequence(config: Config, model: ModelSize, longest: int) -> None:
    """Raise `UserError` if no number of ranks is enough, since one sequence is too long for one."""
    one = config.changed(learner={"max_tokens_per_microbatch": 1})  # a sequence at a time
    parts = memory.of_rank(one, model, max_prompt(config))
    if total(parts) > (gpu_gb := config.cluster.gpu_memory_gb) * GB:
        raise UserError(
            f"rollout.max_completion_length = {config.rollout.max_completion_length}: to train on "
            f"one sequence of {longest:,} tokens takes {size_text(total(parts))} of a rank's GPU, "
            f"without weights and optimizer, more than cluster.gpu_memory_gb = {gpu_gb:g}; one "
            "sequence over several ranks (context parallelism) is not there"
            + ("" if config.learner.gradient_checkpointing else ": gradient_checkpointing = true?")
        )


def _check_node(config: Config, model: ModelSize, node: Node) -> None:
    parts = of_node(config, model, node)
    if total(parts) > config.cluster.memory_gb * GB:
        largest = max(parts, key=lambda part: part.num_bytes)
        raise UserError(
            f"cluster.memory_gb = {config.cluster.memory_gb:g}: node {node.number} takes "
            f"{size_text(total(parts))}, {size_text(largest.num_bytes)} of it {largest.what}"
        )


def _head(config: Config, model: ModelSize) -> Iterator[str]:
    cluster, parameters = config.cluster, f"{model.num_parameters:,} parameters"
    if model.num_experts:
        parameters += f", {model.num_experts} experts"
    yield f"{config.model.name}: {parameters}, computed in {model.name_of_dtype}"
    yield (
        f"{cluster.nodes} x {cluster.gpus_per_node} GPUs of {cluster.gpu_memory_gb:g} GB, "
        f"{cluster.memory_gb:g} GB a node; runtime {config.runtime}"
    )


def _nodes(config: Config, model: ModelSize, nodes: Sequence[Node]) -> Iterator[str]:
    """Describe the nodes; consecutive nodes with equal numbers of workers share an entry."""
    yield "nodes:"
    for _, group in groupby(nodes, lambda node: (len(node.ranks), len(node.instances))):
        alike = list(group)
        parts = of_node(config, model, alike[0])
        numbers = _span("node", [node.number for node in alike])
        yield f"  {numbers}: {_workers(config, alike)}"
        yield from map(_line, [*parts, MemoryPart("main memory of a node", total(parts))])


def _workers(config: Config, nodes: Sequence[Node]) -> str:
    ranks = [rank for node in nodes for rank in node.ranks]
    instances = [instance for node in nodes for instance in node.instances]
    num_gpus = config.rollout.vllm_tensor_parallel_size
    workers = []
    if nodes[0].number == 0:
        workers.append("controller, store, rewards")
    if ranks:
        workers.append(_span("learner rank", ranks))
    if instances:
        on = f" on {num_gpus} GPUs each" if num_gpus > 1 else ""
        workers.append(_span("rollout", instances, "-") + on)
    if _shares_gpu(config):
        how = "in turns" if config.rollout.vllm_sleeps else "together"
        workers.append(f"learner and rollout on GPU 0 {how}")
    free = sum(node.num_free for node in nodes)
    if free and not _shares_gpu(config):
        workers.append(f"{free} GPUs free")
    return "; ".join(workers)


def _span(what: str, numbers: Sequence[int], join: str = " ") -> str:
    first, last = numbers[0], numbers[-1]
    plural = "" if first == last or join == "-" else "s"
    return f"{what}{plural}{join}{first}" + ("" if first == last else f" to {last}")


def _table(title: str, parts: Sequence[MemoryPart]) -> Iterator[str]:
    yield f"{title}:"
    yield from map(_line, [*parts, MemoryPart("in all", total(parts))])


def _line(part: MemoryPart) -> str:
    return f"    {part.what:<55} {size_text(part.num_bytes):>9}"


def _rates(config: Config, model: ModelSize) -> Iterator[str]:
    """Describe upper bounds of the rates, by the cost model: if every instance is full and the
    learner never waits. `rhymeflow simulate` takes lengths, pulls and staleness into account.
    Raises `UserError` if the cost model is of another number of GPUs."""
    rollout, workload = config.rollout, config.simulation.workload
    profile = adapted(build.profile_of(config), config)
    cost = profile.cost(config.learner.num_ranks)
    mean = workload.mean_length or rollout.max_completion_length / 4
    cached = workload.prompt_tokens + mean / 2  # mean cached tokens of a running response
    capacity = memory.kv_tokens(config, model, max_prompt(config))
    running = min(rollout.max_num_seqs, capacity / cached)  # responses per instance
    rollout_rate = rollout.num_instances * cost.throughput(running, running * cached)
    prompt_share = workload.prompt_tokens / rollout.num_generations  # computed once per group
    per_token = emulation.learner_cost(cost, config.learner).train_token
    learner_rate = mean / (mean + prompt_share) / per_token
    both, how = min(rollout_rate, learner_rate), "both, the slower of the two"
    if _shares_gpu(config):  # the times per token add up
        both, how = rollout_rate * learner_rate / (rollout_rate + learner_rate), "both, in turns"
    stored_bytes = TOKEN_BYTES + TOKEN_DETAIL_BYTES * config.run.token_details
    yield f"at most, by the cost model {profile.name}, responses of {mean:,.0f} tokens:"
    for what, rate in (
        ("rollout", rollout_rate),
        ("learner", learner_rate),
        (f"both, {how}", both),
    ):
        yield f"    {what:<55} {rate:>9,.0f} tokens/s"
    yield _line(MemoryPart("store, a day", both * stored_bytes * _DAY))
