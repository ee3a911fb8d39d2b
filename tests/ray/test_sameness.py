"""On three nodes a synchronous run samples the tokens and has the losses that it has locally."""

import os

import pytest

from tests.ray.runs import on_ray, train_while
from tests.runtime.logs import audit, check_replay, tokens, train
from tests.runtime.test_resume import BY_DIFFERENCES, SYNCHRONOUS, learned, small

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
SECTIONS = {
    **SYNCHRONOUS,
    "weights": BY_DIFFERENCES["weights"],
    "rollout": {"num_instances": 2, "num_threads": 1},
    "drafting": {"window": "aimd"},
    "run": {"save_steps": 0, "save_seconds": 0.0},
}
RANKS = {"learner": {**BY_DIFFERENCES["learner"], "num_ranks": 2, "max_steps": 4}}


def histories() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("rhymeflow-history")}


def test_tokens_and_losses_are_those_of_a_local_run(nodes, tmp_path):
    cluster = nodes(2)
    before = histories()  # nodes that other tests killed left theirs
    local = small(tmp_path, "local", **SECTIONS, **RANKS)
    train(local)
    places: dict[str, str] = {}

    def look(controller):
        supervisor = controller.supervisor
        workers = [*supervisor.ranks, *supervisor.instances.values()]
        places.update({worker.name: worker.node for worker in workers})
        return None not in places.values()

    there = on_ray(tmp_path, cluster.address, **SECTIONS, **RANKS)
    train_while(there, look)
    assert tokens(tmp_path / "run") == tokens(tmp_path / "local")
    assert learned(tmp_path / "run") == learned(tmp_path / "local")
    audit(tmp_path / "run")
    check_replay(there)
    assert places["learner"] == places["learner-rank-1"]
    assert len(set(places.values())) > 1, "all of it ran on one node"
    assert histories() <= before, "an index was left in shared memory"
