"""Where history predicts nothing, rhymeflow loses nothing to staleflow, which does not ask it."""

from __future__ import annotations

import pytest

from rhymeflow.config.load import read_config
from rhymeflow.sim.result import Result
from rhymeflow.sim.simulate import run
from rhymeflow.sim.workload import workload

MOST_LOST = 0.03

HISTORIES = {
    "shuffled": {"simulation.workload.epoch_correlation": "0"},
    "of prompts that are all alike": {"simulation.workload.prompt_variance_share": "0"},
}


def simulated(schedule: str, bound: int, history: str) -> Result:
    config = read_config(
        "cluster",
        {
            "schedule.name": schedule,
            "schedule.max_staleness": str(bound),
            "rollout.num_instances": "4",
            "learner.num_ranks": "20",
            "simulation.workload.num_prompts": "64",
            "simulation.workload.prompt_tokens": "256",
            "simulation.workload.mean_length": "2000",
            "rollout.max_completion_length": "8192",
            "learner.groups_per_batch": "32",
            "learner.max_steps": "14",
            **HISTORIES[history],
        },
    )
    return run(config, workload(config, None), uncounted=bound)


@pytest.mark.parametrize("bound", [1, 3])
@pytest.mark.parametrize("history", HISTORIES)
def test_rhymeflow_falls_back(history: str, bound: int) -> None:
    ours, theirs = (simulated(name, bound, history) for name in ("rhymeflow", "staleflow"))
    assert ours.throughput >= (1 - MOST_LOST) * theirs.throughput
