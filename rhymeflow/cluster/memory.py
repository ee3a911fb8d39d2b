"""Bytes that a worker takes of its GPUs, and a node of its main memory.

Products of shapes, as in `sizes.py`. Two rows are estimates and called so: activations, after
Korthikanti et al. (arXiv 2205.05198, section 4.1: 34 bytes a token, layer and unit of the hidden
size in 16 bits, two of them with layers computed again), and processes. Left out: what CUDA, NCCL
and allocators keep, about 2 GB of a GPU, so a plan that fits to the last GB does not fit.

vLLM takes `vllm_gpu_memory_utilization` of each of its GPUs, and what weights leave of that is KV
cache: the capacity that the simulator's profiles have (`tests/cluster/test_profiles.py`).
"""

from __future__ import annotations

from typing import NamedTuple

from rhymeflow.cluster.placement import Node
from rhymeflow.cluster.policy import Policy
from rhymeflow.config import Config
from rhymeflow.machine import HISTORY_TOKEN
from rhymeflow.sizes import MASTER
from rhymeflow.weights.changes import MOST
from rhymeflow.weights.stores import SPARE_VERSIONS

GB = 1e9
PROCESS = 3_000_000_000
"""Main memory of a process that computes on a GPU: Python, torch, CUDA's libraries; estimated."""
_ACTIVATIONS, _RECOMPUTED = 34, 2
"""Bytes for each token, layer and unit of the hidden size, at two bytes a value."""


class Part(NamedTuple):
    """What takes memory, and how much of it, in bytes."""

    what: str
    num_bytes: float


def of_rank(config: Config, policy: Policy) -> list[Part]:
    """What one rank takes of its GPU."""
    learner, model = config.learner, policy.model
    count = learner.num_ranks
    masters = model.num_parameters * MASTER / count
    parts = []
    if not learner.offload_optimizer:
        share = "" if count == 1 else f", 1/{count}"
        parts = [
            Part(f"master weights (float32){share}", masters),
            Part(f"gradients (float32){share}", masters),
            Part(f"AdamW moments (2 x float32){share}", 2 * masters),
        ]
    layers = 2 * (model.num_parameters - model.num_outside) / model.num_layers
    gathered = 2 * (model.num_outside + layers) * model.bytes_per_value
    if count == 1:
        parts.append(Part(f"weights ({model.name_of_dtype})", policy.weights))
    else:
        parts.append(Part("gathered: embeddings, head and two layers", gathered))
    if learner.beta > 0:
        size = masters if count > 1 else policy.weights
        parts.append(Part("reference model", size))
    logits = 2 * learner.logits_chunk_size * model.vocab_size * MASTER
    parts.append(Part(f"logits, {learner.logits_chunk_size:,} rows, and their gradient", logits))
    parts.append(Part("activations (estimate)", _activations(config, policy)))
    return parts


def _activations(config: Config, policy: Policy) -> float:
    learner, layers = config.learner, policy.model.num_layers
    unit = learner.max_tokens_per_microbatch * policy.hidden_size * policy.model.bytes_per_value / 2
    if learner.gradient_checkpointing:
        return unit * (_RECOMPUTED * layers + _ACTIVATIONS)
    return unit * _ACTIVATIONS * layers


def of_instance(config: Config, policy: Policy) -> list[Part]:
    """What an instance takes of each of its GPUs."""
    each = config.rollout.vllm_tensor_parallel_size
    cache = kv_tokens(config, policy) * policy.kv_token / each
    return [
        Part("weights" + ("" if each == 1 else f", 1/{each}"), policy.weights / each),
        Part(f"KV cache, {max(0, kv_tokens(config, policy)):,} tokens", max(0.0, cache)),
    ]


def kv_tokens(config: Config, policy: Policy) -> int:
    """Tokens that the KV cache of an instance holds; below 0: its weights alone are too large."""
    rollout = config.rollout
    each = rollout.vllm_tensor_parallel_size
    if rollout.engine == "native":  # grows as it has to
        return rollout.max_num_seqs * longest(config, policy)
    there = rollout.vllm_gpu_memory_utilization * config.cluster.gpu_memory_gb * GB * each
    return int((there - policy.weights) // policy.kv_token)


def longest(config: Config, policy: Policy) -> int:
    """Tokens of the longest prompt and response."""
    prompt = config.data.max_prompt_length or config.simulation.workload.prompt_tokens
    model = config.rollout.vllm_max_model_length or policy.model.max_positions
    return min(model, prompt + config.rollout.max_completion_length)


def of_node(config: Config, policy: Policy, node: Node) -> list[Part]:
    """What the workers of a node take of its main memory."""
    workers = len(node.ranks) + sum(map(len, node.instances.values()))
    if not workers:
        return []
    parts = [
        Part(f"{workers} processes (estimate)", workers * PROCESS),
        Part("weights staged, two versions", 2 * policy.weights),
    ]
    if config.weights.transport == "delta":
        versions = config.schedule.bound + SPARE_VERSIONS
        changes = versions * 2 * MOST * policy.weights
        parts.append(Part(f"changes to {versions} versions, at most", changes))
    if config.learner.offload_optimizer and node.ranks:
        share = len(node.ranks) / config.learner.num_ranks
        taken = 4 * MASTER * policy.model.num_parameters * share
        parts.append(Part("master weights, gradients, AdamW moments", taken))
    if config.drafting.window != "off" and node.instances:
        tokens = config.drafting.history_tokens
        parts.append(Part(f"history index, {tokens:,} tokens", tokens * HISTORY_TOKEN))
    return parts


def total(parts: list[Part]) -> float:
    """Bytes of all of them."""
    return sum(part.num_bytes for part in parts)
