"""Simulated runs as run directories: what is in them is what the simulation says of itself."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from rhymeflow.config.load import read_config
from rhymeflow.core.types import TrajectoryId
from rhymeflow.dashboard import groups, log, time_view, views
from rhymeflow.dashboard.run import Run
from rhymeflow.errors import UserError
from rhymeflow.observe import metrics, query
from rhymeflow.observe.query import TokenTexts
from rhymeflow.observe.runs import read
from rhymeflow.sim.result import SimulationResult
from rhymeflow.sim.simulate import run, simulate
from rhymeflow.sim.workload import workload
from rhymeflow.store.reader import TrajectoryReader
from tests.runtime.logs import audited

SMALL = {
    "learner.max_steps": "6",
    "learner.groups_per_batch": "4",
    "rollout.num_instances": "2",
    "schedule.max_staleness": "2",
    "simulation.skip_steps": "1",
}
TURNS = {
    "simulation.workload.mean_turns": "3",
    "simulation.workload.observation_tokens": "20",
    "simulation.workload.environment_seconds": "0.5",
}
FAULTS = {
    "simulation.faults.device_mtbf_hours": "0.01",
    "simulation.faults.controller_mtbf_hours": "0.05",
}


def recorded(directory: Path, **fields: str) -> SimulationResult:
    return simulate(read_config("demo", {**SMALL, **fields}), output=directory)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"schedule.name": "partial", "rollout.kv_cache_on_pull": "keep"},
        {"schedule.name": "staleflow", "drafting.window": "off"},
        FAULTS,
        {
            **TURNS,
            "schedule.name": "synchronous",
            "schedule.max_staleness": "null",
            "schedule.extra_groups": "2",
            "schedule.extra_generations": "3",
        },
    ],
)
def test_the_store_says_what_the_simulation_does(tmp_path, fields):
    result = recorded(tmp_path / "run", **fields)
    config = read_config("demo", {**SMALL, **fields})
    assert result == run(config, workload(config, None)), "recording changes nothing"
    with closing(TrajectoryReader(tmp_path / "run" / "events.db")) as reader:
        staleness = reader.query("SELECT staleness, COUNT(*) FROM trained GROUP BY 1 ORDER BY 1")
        assert dict(staleness) == result.staleness
        ((mean,),) = reader.query("SELECT AVG(length) FROM trained")
        assert mean == pytest.approx(result.mean_length)
        ((events, commands),) = reader.query(
            "SELECT (SELECT COUNT(*) FROM events WHERE kind != 'Tick'),"
            " (SELECT COUNT(*) FROM commands)"
        )
        assert (events, commands) == (result.events, result.commands)
        ages = list(metrics.rows(tmp_path / "run"))
        assert max(row["staleness/max"] for row in ages) == max(result.staleness)
        mean = sum(row["staleness/mean"] for row in ages) / len(ages)
        trained = sum(result.staleness.values())
        assert mean == pytest.approx(sum(a * n for a, n in result.staleness.items()) / trained)
        # What was finished is there in full, each token once.
        assert not reader.query(
            "SELECT t.group_id FROM trajectories t JOIN groups g USING (group_id) LEFT JOIN"
            " (SELECT group_id, member, SUM(length) AS length FROM pruned GROUP BY 1, 2) p"
            " USING (group_id, member) WHERE g.ending IS NOT NULL AND p.length IS NOT t.length"
        )


def test_a_simulated_run_is_audited(tmp_path):
    recorded(tmp_path / "run", **TURNS, **{"schedule.max_staleness": "null"})
    code, printed = audited(tmp_path / "run")
    assert code == 0, printed
    assert "law 1: 192 trajectories trained on, bound 1" in printed
    assert "pulls of no weights: it was simulated" in printed


def test_everything_that_looks_at_runs_can_look_at_it(tmp_path):
    result = recorded(tmp_path / "run", **TURNS)
    seen = Run(tmp_path / "run", "run")
    with seen.reader() as reader:
        overview = query.overview(seen.directory, reader, seen.metrics.rows())
    assert (overview["steps"], overview["ended"], overview["bound"]) == (6, True, 2)
    assert overview["endings"]["consumed"] == 24
    found = time_view.found(seen)
    lanes = {lane["name"]: lane for lane in found["lanes"]}
    assert list(lanes) == ["learner", "rollout-0", "rollout-1", "environments"]
    kinds = {span[0] for span in lanes["rollout-0"].get("spans", ())}
    kinds |= lanes["rollout-0"].get("shares", {}).keys()
    assert kinds == {"there", "generating", "waiting", "prefill", "pull"}
    listed = groups.listed(seen, groups.GroupQuery(step=2))["groups"]
    assert len(listed) == 4
    with seen.reader() as reader:
        whole = query.group(reader, listed[0]["group"])
    assert whole["members"][0]["length"] > 0
    texts = TokenTexts(lambda config: lambda tokens: [])
    every = [
        views.response(seen, TrajectoryId(listed[0]["group"], each["member"]), texts)
        for each in whole["members"]
    ]
    assert any(segment["observed"] for each in every for segment in each["segments"])
    assert all(each["tokens"] is None for each in every)
    assert views.drafts(seen)["epochs"]
    assert log.listed(seen, log.LogQuery(kind="Train"))["rows"]
    assert read(tmp_path / "run")["state"] == "ended"
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    times = [json.loads(row)["step_time"] for row in rows]
    assert times == pytest.approx(result.step_seconds)


def test_a_mistake_leaves_no_directory(tmp_path):
    with pytest.raises(UserError, match="there is no such profile"):
        recorded(tmp_path / "new" / "run", **{"simulation.profile": "nope"})
    assert not any(tmp_path.iterdir())


def test_a_run_is_never_replaced_and_a_simulation_is(tmp_path):
    recorded(tmp_path / "run")
    recorded(tmp_path / "run", **{"learner.max_steps": "3"})
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    with pytest.raises(UserError, match="leaves nothing to measure"):
        recorded(tmp_path / "run", **{"learner.max_steps": "1"})
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3, "is still there"
    (tmp_path / "run" / "config.yaml").write_text("")
    before = (tmp_path / "run" / "events.db").read_bytes()
    with pytest.raises(UserError, match="holds a run; a simulation needs a directory of its own"):
        recorded(tmp_path / "run")
    assert (tmp_path / "run" / "events.db").read_bytes() == before


def test_a_file_that_no_simulation_wrote_is_not_replaced(tmp_path):
    """It may be another program's, or the figures of a run whose log is elsewhere."""
    (tmp_path / "result.json").write_text("mine")
    with pytest.raises(UserError, match=r"has a result\.json that no simulation wrote"):
        recorded(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["result.json"]
    assert (tmp_path / "result.json").read_text() == "mine"
