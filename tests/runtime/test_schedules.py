"""Schedules train for real, on two instances, and their logs can be replayed.

`synchronous`, `partial` and `rhymeflow` do in test_resume.py.
"""

from __future__ import annotations

import pytest

from rhymeflow.core.commands import Abort, Interrupt, Route
from tests.runtime.logs import check_bound, check_replay, reader, replay, train
from tests.runtime.tiny import save_model, save_prompts, tiny_config

pytestmark = pytest.mark.slow

EVERYTHING = {
    "name": "staleflow",
    "max_staleness": 2,
    "extra_groups": 1,
    "extra_generations": 1,
    "filter_zero_variance": True,
    "on_stuck": "truncate",
}
SCHEDULES = [
    {"name": "one_step"},
    {"name": "bounded", "max_staleness": 2},
    {"name": "staleflow", "sync": "when_version_unusable"},
    EVERYTHING,
]


@pytest.mark.parametrize(
    "schedule", SCHEDULES, ids=lambda s: "everything" if s is EVERYTHING else s["name"]
)
def test_it_trains_within_its_bound_and_the_log_gives_the_same_commands(tmp_path, schedule):
    save_model(tmp_path / "model", unused_ids=500)  # long responses, which see pulls
    save_prompts(tmp_path / "prompts.jsonl")
    config = tiny_config(
        tmp_path,
        rollout={"num_instances": 2, "max_num_seqs": 5, "max_completion_length": 100},
        learner={"max_steps": 6, "groups_per_batch": 3},
        schedule=schedule,
        drafting={"window": "cost" if schedule is EVERYTHING else "off"},
    )
    summary = train(config)
    assert summary.steps == 6
    assert summary.endings["consumed"] == 18
    check_bound(config)
    check_replay(config)
    commanded = replay(config)
    kinds = {type(c) for _, commands in commanded for c in commands}
    begun = [c.trajectory for _, cs in commanded for c in cs if isinstance(c, Route)]
    moved = len(begun) - len(set(begun))
    assert (Interrupt in kinds) == (schedule["name"] == "staleflow") == (moved > 0)
    assert (Abort in kinds) == (schedule is EVERYTHING)
    log = reader(config)
    several = log.query(
        "SELECT COUNT(*) FROM (SELECT COUNT(DISTINCT version) AS n FROM segments"
        " GROUP BY group_id, member) WHERE n > 1"
    )
    log.close()
    assert (several[0][0] > 0) == (schedule["name"] == "staleflow")
