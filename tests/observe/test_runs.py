"""`rhymeflow runs`: which runs are found, what state they are in, and what tells them apart."""

import fcntl
import io
import json
import os

import pytest
from rich.console import Console

from rhymeflow import cli
from rhymeflow.build import rules_in_force
from rhymeflow.config.load import read_config
from rhymeflow.core.commands import Finish
from rhymeflow.core.events import Tick
from rhymeflow.observe import summary
from rhymeflow.observe.query import changed, differences, fields_of
from rhymeflow.observe.runs import find, read, show
from tests.observe.runs import begun, made, stored


def test_states(tmp_path):
    run_dir = made(tmp_path / "run")
    assert read(run_dir)["state"] == "killed", "nothing says how it ended"
    summary.write(run_dir)
    assert read(run_dir)["state"] == "stopped"
    with stored(run_dir) as store:
        store.record(50.0, [Tick()])
    assert read(run_dir)["state"] == "killed", "the summary is of the attempt before"
    lock = run_dir / "writer.lock"
    lock.write_text("process 1 on elsewhere")
    assert read(run_dir)["state"] == "killed", "the lock of another machine is tried"
    descriptor = os.open(lock, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert read(run_dir)["state"] == "running"
    os.close(descriptor)
    with stored(run_dir) as store:
        store.record_command(store.record(51.0, [Tick()]), Finish())
        assert read(run_dir)["state"] == "running"
    assert read(run_dir)["state"] == "ended"


def test_runs_are_found_below_and_not_in_runs(tmp_path):
    first = made(tmp_path / "runs" / "sweep" / "a")
    second = made(tmp_path / "runs" / "b")
    made(second / "inside")
    assert find([tmp_path / "runs"]) == [second, first]
    assert find([first, tmp_path / "runs"]) == [first, second]


def test_the_list_is_by_time_and_names_what_cannot_be_read(tmp_path, capsys, monkeypatch):
    made(tmp_path / "runs" / "a", "2026-03-02T10:00:00Z")
    made(tmp_path / "runs" / "b", "2026-03-01T10:00:00Z")
    with (tmp_path / "runs" / "b" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "eval/reward": 0.9}\n')  # the best is not the last
    (tmp_path / "runs" / "c").mkdir()
    (tmp_path / "runs" / "c" / "events.db").write_text("birds")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "90")
    assert cli.main(["runs"]) == 0
    out = capsys.readouterr().out
    assert out.index(" b ") < out.index(" a ")
    assert "runs/c: " in out
    assert "cannot be opened as an event store" in out
    assert "killed !" in out
    assert max(map(len, out.splitlines()[:-1])) <= 90
    assert cli.main(["runs", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["path"] for each in found] == ["runs/b", "runs/a", "runs/c"]
    run = found[0]
    assert (run["recipe"], run["steps"], run["max_steps"]) == ("toy", 4, 4)
    assert run["verdicts"] == ["reward function returns None"]
    assert (run["started"], run["trajectories"], run["seconds"]) == ("2026-03-01T10:00:00Z", 16, 41)
    assert [run[f"eval_reward_{which}"] for which in ("first", "best", "last")] == [0.25, 0.9, 0.75]
    assert "0.250  0.900  0.750" in out
    assert run["trajectories_per_s"] == pytest.approx(16 / 41)
    assert "problem" in found[2]


@pytest.mark.parametrize(("width", "left_out"), [(123, ()), (90, ("trained", "recipe", "began"))])
def test_names_are_whole_and_other_columns_give_way(tmp_path, width, left_out):
    name = "a-run-with-a-long-name-20261122-230815"
    made(tmp_path / name)
    made(tmp_path / "b")
    for is_terminal in (True, False):
        console = Console(file=io.StringIO(), width=width, force_terminal=is_terminal)
        show([tmp_path], console)
        out = console.file.getvalue()  # type: ignore[attr-defined]
        assert f"{name} " in out
        for heading in ("recipe", "state", "steps", "best", "trained", "time", "began"):
            assert (heading in out) == (not is_terminal or heading not in left_out), heading


def test_what_was_changed_is_compared_with_the_recipe_or_the_defaults(tmp_path):
    config = read_config("guess", {"learner.learning_rate": "1e-3", "run.output_dir": "here"})
    config = config.model_copy(update={"schedule": rules_in_force(config)})
    fields = fields_of(begun(tmp_path, **json.loads(config.model_dump_json())))
    usual = read_config("guess").learner.learning_rate
    assert changed(fields) == {"recipe": "guess", "fields": {"learner.learning_rate": usual}}
    found = changed({**fields, "name": "mine", "gone": 1})
    assert (found["recipe"], found["fields"]["gone"]) == (None, "(no such field)")
    assert found["fields"]["name"] == "run"


def test_differences_know_types_and_missing_fields():
    found = differences([{"a": 1, "b": 2, "c": True}, {"a": 1, "b": 3, "c": 1, "d": None}])
    assert found == {"b": [2, 3], "c": [True, 1], "d": ["(no such field)", None]}
