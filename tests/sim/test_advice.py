"""What the simulator would change about a run: tried on simulated runs, whose truth is known."""

import json
from pathlib import Path

import pytest

from rhymeflow.config.load import read_config
from rhymeflow.errors import UserError
from rhymeflow.sim import advice
from rhymeflow.sim.advice import Advice, Change, advise
from rhymeflow.sim.simulate import simulate

FIELDS = {
    "learner.max_steps": "16",
    "learner.groups_per_batch": "8",
    "rollout.num_instances": "2",
    "rollout.num_generations": "4",
    "drafting.window": "off",
    "schedule.name": "staleflow",
    "schedule.max_staleness": "1",
    "simulation.skip_steps": "1",
}


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.setattr(advice, "STEPS", 8)
    simulate(read_config("demo", FIELDS), output=tmp_path)
    return tmp_path


def rewrite(run_dir: Path, **fields: float) -> None:
    """Metrics as of another machine."""
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line) | fields for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_neighbours_are_bounds_and_splits_scaled_to_the_run(run_dir):
    found = advise(run_dir)
    assert found.steps == 8
    assert found.simulated == pytest.approx(found.steps_per_second, rel=0.15)
    assert {tuple(each.fields.items()) for each in found.changes} == {
        (("schedule.max_staleness", 2),),
        (("schedule.max_staleness", 3),),
        (("rollout.num_instances", 1), ("learner.num_ranks", 2)),
    }
    rewrite(run_dir, step_time=30.0)
    found = advise(run_dir)
    assert found.steps_per_second == pytest.approx(1 / 30)
    assert found.simulated == pytest.approx(1 / 30, rel=0.15)


def test_a_learner_that_waits_gives_a_device_to_rollout(run_dir):
    fields = FIELDS | {"learner.num_ranks": "2", "rollout.num_instances": "1"}
    fields["rollout.max_num_seqs"] = "8"
    simulate(read_config("demo", fields), output=run_dir)
    rewrite(run_dir, **{"idle/learner": 0.95, "idle/rollout": 0.05})
    best = advise(run_dir).recommended
    assert best is not None
    assert best.fields == {"rollout.num_instances": 2, "learner.num_ranks": 1}
    assert best.gain > 0.3


def test_no_gain_within_the_error_is_recommended():
    change = Change({"schedule.max_staleness": 2}, 0.08)
    assert Advice(20, 1.0, 1.05, (change,)).recommended == change
    assert Advice(20, 1.0, 0.9, (change,)).recommended is None
    assert Advice(20, 1.0, 1.0, (Change({}, 0.02),)).recommended is None
    assert Advice(20, 1.0, 1.0, ()).recommended is None


def test_too_few_steps(run_dir):
    path = run_dir / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(UserError, match="has too few steps to be simulated; it needs 3"):
        advise(run_dir)
