"""Tokens a second that a cluster would generate and train on, and what they take of disks.

By the cost model that the simulator runs on (`schedule.cost_model`), with every instance full and
the learner never waiting: bounds, of which the lower counts. `rhymeflow simulate` says what is left
of it with lengths that differ, pulls and the staleness bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from rhymeflow import profiles
from rhymeflow.cluster.memory import kv_tokens
from rhymeflow.cluster.placement import shares_gpu
from rhymeflow.cluster.policy import Policy
from rhymeflow.config import Config
from rhymeflow.errors import UserError

STORED_TOKEN = 10
"""Bytes of the store for each generated token: eight of the token and its log-probability
(docs/run-directory.md), the rest for events, estimated for responses of some thousand tokens."""
STORED_DETAILS = 6
"""More with `run.token_details`."""
_DAY = 86_400


@dataclass(frozen=True)
class Rates:
    """Response tokens a second of all instances, and of the learner; bytes of the store a day."""

    profile: str
    rollout: float
    learner: float
    both: float
    """What is generated and trained on: the slower of the two, or in turns if they share a GPU."""
    store_day: float
    mean_length: float


def rates(config: Config, policy: Policy) -> Rates:
    """What the cluster would do.

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
    running = min(rollout.max_num_seqs, kv_tokens(config, policy) / there)
    generated = rollout.num_instances * cost.throughput(running, running * there)
    prompt = workload.prompt_tokens / rollout.num_generations  # a group's is computed once
    trained = mean / (mean + prompt) / cost.train_token
    each = STORED_TOKEN + STORED_DETAILS * config.run.token_details
    both = min(generated, trained)
    if shares_gpu(config):  # what one computes, the other does not
        both = generated * trained / (generated + trained)
    return Rates(profile.name, generated, trained, both, both * each * _DAY, mean)
