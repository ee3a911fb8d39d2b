"""A run on the machines of the section `cluster`: refused in one line, or described node by node.

Starts nothing. What is described has its GPUs, and its memory by `memory.py`, on every node. A rank
has a GPU of its own, an instance as many as its model is spread over, all of one node, as with
`runtime: ray`; with `runtime: local` both share the first GPU (docs/cluster.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from rhymeflow import build, memory, profiles
from rhymeflow.config import Config
from rhymeflow.errors import UserError
from rhymeflow.memory import GB, MemoryPart, ModelSize, size_text, total

STORED_TOKEN = 10
"""Bytes of the store for each generated token: eight of the token and its log-probability
(docs/run-directory.md), the rest for events, estimated for responses of some thousand tokens."""
STORED_DETAILS = 6
"""More with `run.token_details`."""
_DAY = 86_400


def describe(config: Config) -> str:
    """The plan as lines that start with `#`.

    Raises:
        UserError: it cannot run as configured, or does not fit.
    """
    model = model_of(config)
    nodes = place(config)
    rank, instance = of_rank(config, model), memory.of_instance(config, model, prompt_of(config))
    _check_gpus(config, model, rank, instance)
    for node in nodes:
        _check_node(config, model, node)
    lines = [*_head(config, model), *_nodes(config, model, nodes)]
    where = "the learner" if config.learner.num_ranks == 1 else "each rank"
    lines += _table(f"GPU memory of {where}", rank)
    where = "the instance" if shares_gpu(config) else "each instance, on each of its GPUs"
    lines += _table(f"GPU memory of {where}", instance)
    try:
        config = build.with_cost_model(config)
    except UserError as unknown:
        lines.append(f"at most so many tokens a second is not known: {unknown}")
    else:
        lines += _rates(config, rates(config, model))
    return "\n".join(f"# {line}".rstrip() for line in lines)


@dataclass(slots=True)
class Node:
    """A machine of the cluster, and what is on its GPUs."""

    number: int
    num_free: int
    """GPUs that nothing is on."""
    ranks: list[int] = field(default_factory=list)
    instances: list[int] = field(default_factory=list)


def shares_gpu(config: Config) -> bool:
    """Whether learner and engine are on one GPU."""
    return config.runtime == "local"


def place(config: Config) -> list[Node]:
    """The nodes of `config.cluster`, with their workers: ranks first, from node 0 on, and instances
    in what is left.

    Raises:
        UserError: there are not so many GPUs, or not so many in one node.
    """
    cluster, ranks = config.cluster, config.learner.num_ranks
    each, instances = config.rollout.vllm_tensor_parallel_size, config.rollout.num_instances
    assert cluster.nodes is not None
    if shares_gpu(config):
        if (cluster.nodes, instances, each, ranks) != (1, 1, 1, 1) or not cluster.gpus_per_node:
            raise UserError(
                "runtime = 'local' computes on the first GPU of one machine, with one instance and "
                "one rank; more GPUs than one need runtime = 'ray'"
            )
        return [Node(0, cluster.gpus_per_node - 1, [0], [0])]
    needed, there = instances * each + ranks, cluster.nodes * cluster.gpus_per_node
    if needed > there:
        raise UserError(
            f"rollout.num_instances = {instances} x rollout.vllm_tensor_parallel_size = {each} and "
            f"learner.num_ranks = {ranks} take {needed} GPUs, and cluster.nodes = {cluster.nodes} "
            f"x cluster.gpus_per_node = {cluster.gpus_per_node} are {there}"
        )
    nodes = [Node(number, cluster.gpus_per_node) for number in range(cluster.nodes)]
    for rank in range(ranks):
        node = nodes[rank // cluster.gpus_per_node]
        node.ranks.append(rank)
        node.num_free -= 1
    for instance in range(instances):
        free = next((node for node in nodes if node.num_free >= each), None)
        if free is None:
            raise UserError(
                f"rollout.num_instances = {instances}: only {instance} of them find "
                f"rollout.vllm_tensor_parallel_size = {each} free GPUs in one node of "
                f"cluster.gpus_per_node = {cluster.gpus_per_node}, beside learner.num_ranks = "
                f"{ranks}"
            )
        free.instances.append(instance)
        free.num_free -= each
    return nodes


def model_of(config: Config) -> ModelSize:
    """The model. Raises `UserError` if it cannot be spread over the GPUs of an instance."""
    model, parts = memory.model_on_gpus(config), config.rollout.vllm_tensor_parallel_size
    if model.num_heads % parts or model.num_kv_heads % parts:
        raise UserError(
            f"rollout.vllm_tensor_parallel_size = {parts} does not divide the "
            f"{model.num_heads} attention heads and {model.num_kv_heads} KV heads of "
            f"{config.model.name}"
        )
    return model


def prompt_of(config: Config) -> int:
    """Tokens of the longest prompt that is planned for."""
    return config.data.max_prompt_length or config.simulation.workload.prompt_tokens


def of_rank(config: Config, model: ModelSize) -> list[MemoryPart]:
    """What one rank takes of its GPU."""
    optimizer = [] if config.learner.offload_optimizer else memory.of_optimizer(config, model)
    return [*optimizer, *memory.of_rank(config, model, prompt_of(config))]


def of_node(config: Config, model: ModelSize, node: Node) -> list[MemoryPart]:
    """What the workers of a node take of its main memory."""
    workers = len(node.ranks) + config.rollout.vllm_tensor_parallel_size * len(node.instances)
    if not workers:
        return []
    parts = [
        MemoryPart(f"{workers} processes (estimate)", workers * memory.PROCESS),
        MemoryPart("weights staged, two versions", 2 * model.weights),
        *memory.of_changes(config, model),
    ]
    if config.learner.offload_optimizer and node.ranks:
        taken = len(node.ranks) * total(memory.of_optimizer(config, model))
        parts.append(MemoryPart("master weights, gradients, AdamW moments", taken))
    return parts + (memory.of_history(config.drafting) if node.instances else [])


def _check_gpus(
    config: Config, model: ModelSize, rank: Sequence[MemoryPart], instance: Sequence[MemoryPart]
) -> None:
    rollout, there = config.rollout, config.cluster.gpu_memory_gb
    least = memory.longest(config, model, prompt_of(config))
    tokens = memory.kv_tokens(config, model, prompt_of(config))
    if tokens < least:
        raise UserError(
            f"rollout.vllm_gpu_memory_utilization = {rollout.vllm_gpu_memory_utilization:g} of "
            f"cluster.gpu_memory_gb = {there:g} on {rollout.vllm_tensor_parallel_size} GPUs: "
            f"beside weights of {size_text(model.weights)} the KV cache would hold "
            f"{max(0, tokens):,} tokens, and one prompt and response may have {least:,}"
        )
    taken, who = total(rank), "a rank takes"
    if shares_gpu(config):
        taken, who = taken + total(instance), "learner and engine take"
    elif rollout.engine == "native" and total(instance) > there * GB:
        raise UserError(
            f"rollout.max_num_seqs = {rollout.max_num_seqs}: an instance takes "
            f"{size_text(total(instance))}, and cluster.gpu_memory_gb = {there:g}"
        )
    if taken > there * GB:
        most = max(rank, key=lambda part: part.num_bytes)
        raise UserError(
            f"learner.num_ranks = {config.learner.num_ranks}: {who} {size_text(taken)}, "
            f"{size_text(most.num_bytes)} of it {most.what}, and cluster.gpu_memory_gb = {there:g}"
        )


def _check_node(config: Config, model: ModelSize, node: Node) -> None:
    parts = of_node(config, model, node)
    if total(parts) > config.cluster.memory_gb * GB:
        most = max(parts, key=lambda part: part.num_bytes)
        raise UserError(
            f"cluster.memory_gb = {config.cluster.memory_gb:g}: node {node.number} takes "
            f"{size_text(total(parts))}, {size_text(most.num_bytes)} of it {most.what}"
        )


class Rates(NamedTuple):
    """Response tokens a second of all instances, and of the learner; bytes of the store a day."""

    profile: str
    rollout: float
    learner: float
    both: float
    """What is generated and trained on: the slower of the two, or in turns if they share a GPU."""
    store_day: float
    mean_length: float


def rates(config: Config, model: ModelSize) -> Rates:
    """What the cluster would do with every instance full and the learner never waiting, by the cost
    model: bounds. `rhymeflow simulate` says what lengths, pulls and the staleness bound leave of
    it.

    Raises:
        UserError: the cost model is of instances with another number of GPUs.
    """
    rollout, workload = config.rollout, config.simulation.workload
    profile = profiles.load(config.simulation.profile or config.schedule.cost_model)
    if profile.devices_per_instance != rollout.vllm_tensor_parallel_size:
        raise UserError(
            f"schedule.cost_model = {profile.name!r} is of instances of "
            f"{profile.devices_per_instance} GPUs, and rollout.vllm_tensor_parallel_size = "
            f"{rollout.vllm_tensor_parallel_size}"
        )
    cost = profile.cost(config.learner.num_ranks)
    mean = workload.mean_length or rollout.max_completion_length / 4
    there = workload.prompt_tokens + mean / 2  # while it runs, on average
    held = memory.kv_tokens(config, model, prompt_of(config))
    running = min(rollout.max_num_seqs, held / there)
    generated = rollout.num_instances * cost.throughput(running, running * there)
    prompt = workload.prompt_tokens / rollout.num_generations  # a group's is computed once
    trained = mean / (mean + prompt) / cost.train_token
    each = STORED_TOKEN + STORED_DETAILS * config.run.token_details
    both = min(generated, trained)
    if shares_gpu(config):  # what one computes, the other does not
        both = generated * trained / (generated + trained)
    return Rates(profile.name, generated, trained, both, both * each * _DAY, mean)


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
    """Nodes with the same numbers of workers in one entry."""
    yield "nodes:"
    for _, alike in groupby(nodes, lambda node: (len(node.ranks), len(node.instances))):
        same = list(alike)
        parts = of_node(config, model, same[0])
        numbers = _span("node", [node.number for node in same])
        yield f"  {numbers}: {_workers(config, same)}"
        yield from map(_line, [*parts, MemoryPart("main memory of a node", total(parts))])


def _workers(config: Config, nodes: Sequence[Node]) -> str:
    ranks = [rank for node in nodes for rank in node.ranks]
    instances = [instance for node in nodes for instance in node.instances]
    each = config.rollout.vllm_tensor_parallel_size
    found = []
    if nodes[0].number == 0:
        found.append("controller, store, rewards")
    if ranks:
        found.append(_span("learner rank", ranks))
    if instances:
        on = f" on {each} GPUs each" if each > 1 else ""
        found.append(_span("rollout", instances, "-") + on)
    if shares_gpu(config):
        found.append("learner and rollout on GPU 0 together")
    free = sum(node.num_free for node in nodes)
    if free and not shares_gpu(config):
        found.append(f"{free} GPUs free")
    return "; ".join(found)


def _span(what: str, numbers: Sequence[int], join: str = " ") -> str:
    first, last = numbers[0], numbers[-1]
    plural = "" if first == last or join == "-" else "s"
    return f"{what}{plural}{join}{first}" + ("" if first == last else f" to {last}")


def _table(title: str, parts: Sequence[MemoryPart]) -> Iterator[str]:
    yield f"{title}:"
    yield from map(_line, [*parts, MemoryPart("in all", total(parts))])


def _line(part: MemoryPart) -> str:
    return f"    {part.what:<55} {size_text(part.num_bytes):>9}"


def _rates(config: Config, found: Rates) -> Iterator[str]:
    length = f"{found.mean_length:,.0f}"
    yield f"at most, by the cost model {found.profile}, responses of {length} tokens:"
    both = "in turns" if shares_gpu(config) else "the slower of the two"
    for what, rate in (
        ("rollout", found.rollout),
        ("learner", found.learner),
        (f"both, {both}", found.both),
    ):
        yield f"    {what:<55} {rate:>9,.0f} tokens/s"
    yield _line(MemoryPart("store, a day", found.store_day))
