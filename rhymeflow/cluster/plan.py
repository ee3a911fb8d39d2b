"""A run on the machines of the section `cluster`: refused in one line, or described node by node.

Holds true: what is described has its GPUs, and its memory by `memory.py`, on every node. Starts
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rhymeflow import build
from rhymeflow.cluster import memory
from rhymeflow.cluster.memory import GB, Part, total
from rhymeflow.cluster.placement import Node, place, shares_gpu
from rhymeflow.cluster.policy import Policy, policy_of
from rhymeflow.cluster.rates import Rates, rates
from rhymeflow.config import Config
from rhymeflow.errors import UserError
from rhymeflow.sizes import size_text


def describe(config: Config) -> str:
    """The plan as lines that start with `#`.

    Raises:
        UserError: it cannot run as configured, or does not fit.
    """
    policy = policy_of(config)
    nodes = place(config)
    rank, instance = memory.of_rank(config, policy), memory.of_instance(config, policy)
    _check_gpus(config, policy, rank, instance)
    for node in nodes:
        _check_node(config, policy, node)
    lines = [*_head(config, policy), *_nodes(config, policy, nodes)]
    where = "the learner" if config.learner.num_ranks == 1 else "each rank"
    lines += _table(f"GPU memory of {where}", rank)
    lines += _table("GPU memory of the instance" if shares_gpu(config) else
                    "GPU memory of each instance, on each of its GPUs", instance)  # fmt: skip
    try:
        config = build.with_cost_model(config)
    except UserError as unknown:
        lines.append(f"at most so many tokens a second is not known: {unknown}")
    else:
        lines += _rates(config, rates(config, policy))
    return "\n".join(f"# {line}".rstrip() for line in lines)


def _check_gpus(
    config: Config, policy: Policy, rank: Sequence[Part], instance: Sequence[Part]
) -> None:
    rollout, there = config.rollout, config.cluster.gpu_memory_gb
    least, tokens = memory.longest(config, policy), memory.kv_tokens(config, policy)
    if tokens < least:
        raise UserError(
            f"rollout.vllm_gpu_memory_utilization = {rollout.vllm_gpu_memory_utilization:g} of "
            f"cluster.gpu_memory_gb = {there:g} on {rollout.vllm_tensor_parallel_size} GPUs: "
            f"beside weights of {size_text(policy.weights)} the KV cache would hold "
            f"{max(0, tokens):,} tokens, and one prompt and response may have {least:,}"
        )
    taken, who = total(list(rank)), "a rank takes"
    if shares_gpu(config):
        taken, who = taken + total(list(instance)), "learner and engine take"
    elif rollout.engine == "native" and total(list(instance)) > there * GB:
        raise UserError(
            f"rollout.max_num_seqs = {rollout.max_num_seqs}: an instance takes "
            f"{size_text(total(list(instance)))}, and cluster.gpu_memory_gb = {there:g}"
        )
    if taken > there * GB:
        most = max(rank, key=lambda part: part.num_bytes)
        raise UserError(
            f"learner.num_ranks = {config.learner.num_ranks}: {who} {size_text(taken)}, "
            f"{size_text(most.num_bytes)} of it {most.what}, and cluster.gpu_memory_gb = {there:g}"
        )


def _check_node(config: Config, policy: Policy, node: Node) -> None:
    parts = memory.of_node(config, policy, node)
    if total(parts) > config.cluster.memory_gb * GB:
        most = max(parts, key=lambda part: part.num_bytes)
        raise UserError(
            f"cluster.memory_gb = {config.cluster.memory_gb:g}: node {node.number} takes "
            f"{size_text(total(parts))}, {size_text(most.num_bytes)} of it {most.what}"
        )


def _head(config: Config, policy: Policy) -> Iterator[str]:
    cluster, model = config.cluster, policy.model
    assert cluster.nodes is not None
    experts = f", {policy.num_experts} experts" if policy.num_experts else ""
    yield (
        f"{config.model.name}: {model.num_parameters:,} parameters{experts}, computed in "
        f"{model.name_of_dtype}"
    )
    yield (
        f"{cluster.nodes} x {cluster.gpus_per_node} GPUs of {cluster.gpu_memory_gb:g} GB, "
        f"{cluster.memory_gb:g} GB a node; runtime {config.runtime}"
    )


def _nodes(config: Config, policy: Policy, nodes: Sequence[Node]) -> Iterator[str]:
    """Nodes with the same numbers of workers in one entry."""
    yield "nodes:"

    def kind(node: Node) -> tuple[int, int]:
        return len(node.ranks), len(node.instances)

    for _, alike in groupby(nodes, kind):
        same = list(alike)
        first = same[0]
        numbers = _span("node", [node.number for node in same])
        yield f"  {numbers}: {_workers(config, same)}"
        for part in memory.of_node(config, policy, first):
            yield f"    {part.what:<55} {size_text(part.num_bytes):>9}"
        yield f"    {'main memory of a node':<55} {_sum(memory.of_node(config, policy, first))}"


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
        found.append(
            _span("rollout", instances, "-") + (f" on {each} GPUs each" if each > 1 else "")
        )
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


def _table(title: str, parts: Sequence[Part]) -> Iterator[str]:
    yield f"{title}:"
    for part in parts:
        yield f"    {part.what:<55} {size_text(part.num_bytes):>9}"
    yield f"    {'in all':<55} {_sum(parts)}"


def _sum(parts: Sequence[Part]) -> str:
    return f"{size_text(total(list(parts))):>9}"


def _rates(config: Config, found: Rates) -> Iterator[str]:
    length = f"{found.mean_length:,.0f}"
    yield f"at most, by the cost model {found.profile}, responses of {length} tokens:"
    yield f"    {'rollout':<55} {found.rollout:>9,.0f} tokens/s"
    yield f"    {'learner':<55} {found.learner:>9,.0f} tokens/s"
    both = "in turns" if shares_gpu(config) else "the slower of the two"
    yield f"    {'both, ' + both:<55} {found.both:>9,.0f} tokens/s"
    yield f"    {'store, a day':<55} {size_text(found.store_day):>9}"
