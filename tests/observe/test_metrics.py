"""metrics.jsonl, read back; trackers."""

import math
import runpy
import signal
from pathlib import Path

import pytest

from rhymeflow.config.run import RunConfig
from rhymeflow.errors import UserError
from rhymeflow.observe import meanings, metrics
from rhymeflow.observe.metrics import MetricsWriter
from tests.refused import refusal


def test_rows_of_one_step_are_joined_and_a_half_line_left_out(tmp_path):
    writer = MetricsWriter(tmp_path, run=RunConfig(report_to=()), name="run", config={})
    writer.write(2, 3.00049, {"reward": 0.5, "grad_norm": math.inf})
    line = '{"step":2,"time":3.0,"reward":0.5,"grad_norm":null}\n'
    assert (tmp_path / "metrics.jsonl").read_text() == line, "it is there at once"
    writer.write(1, 1.0, {"reward": 0.25})
    writer.close()
    writer = MetricsWriter(tmp_path, run=RunConfig(report_to=()), name="run", config={})  # goes on
    writer.write(2, 4.0, {"eval/reward": 0.75})
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    assert metrics.read(tmp_path) == {
        1: {"step": 1, "time": 1.0, "reward": 0.25},
        2: {"step": 2, "time": 3.0, "reward": 0.5, "grad_norm": None, "eval/reward": 0.75},
    }, "a step ended when it did, not when it was evaluated"
    assert list(metrics.read(tmp_path)) == [1, 2]
    assert metrics.read(tmp_path / "nothing") == {}


@pytest.mark.parametrize("file", [metrics.FILE, metrics.VERDICTS])
def test_what_a_resumed_run_does_again_is_forgotten(tmp_path, file):
    path = tmp_path / file
    rows = ['{"step": 1, "x": 0.1}\n', '{"step": 2}\n', '{"step": 1, "eval/reward": 1e-05}\n']
    path.write_text("".join(rows) + '{"step": 3')
    metrics.forget_after(tmp_path, 1)
    assert path.read_text() == rows[0] + rows[2]
    before = path.stat().st_ino
    metrics.forget_after(tmp_path, 1)
    assert path.stat().st_ino == before, "there was nothing to forget"


@pytest.mark.parametrize(
    ("line", "message"),
    [("oops", "is not JSON"), ("[1]", "is no object"), ('{"step": 1, "é": 1}', "is not JSON")],
)
def test_a_foreign_line_is_named(tmp_path, line, message):
    (tmp_path / "metrics.jsonl").write_bytes(f'{{"step": 1}}\n{line}\n'.encode("latin-1"))
    followed = metrics.LiveRows(tmp_path / metrics.FILE)
    for _ in range(2):
        assert f"metrics.jsonl, line 2: {message}" in refusal(followed.rows)


def test_rows_are_read_as_they_come(tmp_path):
    path, followed = tmp_path / "metrics.jsonl", metrics.LiveRows(tmp_path / metrics.FILE)
    assert followed.rows() == []
    path.write_text('{"step": 1, "a": 1.5}\n{"step": 2, "b": 3')
    assert followed.rows() == [{"step": 1, "a": 1.5}]
    with path.open("a") as file:
        file.write('}\n{"step": 3, "a": null}\n')
    assert followed.rows()[1:] == [{"step": 2, "b": 3}, {"step": 3, "a": None}]
    path.write_text('{"step": 1, "a": 2.5}\n')  # a resumed run takes rows out
    assert followed.rows() == [{"step": 1, "a": 2.5}]


def test_tensorboard_has_the_same_numbers_and_not_what_a_resumed_run_does_again(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first_step, value in ((0, 1.0), (2, 5.0)):
        writer = MetricsWriter(
            tmp_path, run=RunConfig(), name="run", config={}, first_step=first_step
        )
        for step in range(max(first_step, 1), 4):
            writer.write(step, 1.0, {"reward": value, "staleness/max": 1.0})
        writer.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert sorted(board.Tags()["scalars"]) == ["reward", "staleness/max"]
    found = [(e.step, e.value) for e in board.Scalars("reward")]
    assert found == [(1, 1.0), (2, 5.0), (3, 5.0)]


class FakeTracker:
    """Stands for the module of a tracker, and for the run that `init` returns."""

    id = "abc123"

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def init(self, **how):
        folders = ("dir", "logdir")
        given = {k: v for k, v in how.items() if v is not None and k not in folders}
        self.calls.append(("init", given))
        self.name = how.get("name")
        return self

    def define_metric(self, names, step_metric):
        assert (names, step_metric) == ("*", "step")

    def log(self, row, step=None):
        self.calls.append(("log", {"step": step, **row}))

    def finish(self):
        self.calls.append(("finish",))


WANDB = {"entity": "us", "tags": ("a", "b")}
SWANLAB = {"workspace": "us", "tags": ["a", "b"]}
AGAIN = {"id": "abc123", "resume": "allow"}


@pytest.mark.parametrize(
    ("name", "labels", "first", "again"),
    [
        ("wandb", WANDB, WANDB, WANDB | AGAIN | {"allow_val_change": True}),
        ("trackio", {}, {"resume": "never"}, {"resume": "allow", "name": "demo"}),
        ("swanlab", WANDB, SWANLAB, SWANLAB | AGAIN),
    ],
)
def test_trackers_get_the_rows_and_a_resumed_run_goes_on_in_its_run(
    tmp_path, monkeypatch, name, labels, first, again
):
    """Also if its directory was moved, and the run would be called otherwise now. Ctrl-C is left
    to the run."""
    fake = FakeTracker()
    monkeypatch.setitem(metrics.importlib.sys.modules, name, fake)
    ours, init = signal.getsignal(signal.SIGINT), fake.init
    if name == "swanlab":  # takes it
        fake.init = lambda **how: signal.signal(signal.SIGINT, signal.SIG_IGN) and init(**how)
    run = RunConfig(report_to=(name,), project="mine", run_group="sweep", **labels)
    writer = MetricsWriter(tmp_path, run=run, name="demo", config={"seed": 1})
    writer.write(1, 0.5, {"reward": 0.5})
    writer.close()
    MetricsWriter(tmp_path, run=run, name="moved", config={}).close()
    assert signal.getsignal(signal.SIGINT) is ours
    common = {"project": "mine", "group": "sweep", "config": {}}
    assert fake.calls == [
        ("init", common | {"name": "demo", "config": {"seed": 1}} | first),
        ("log", {"step": 1, "reward": 0.5}),
        ("finish",),
        ("init", common | {"name": "moved"} | again),
        ("finish",),
    ]


def test_wandbs_own_variable_names_the_project(tmp_path, monkeypatch):
    monkeypatch.setitem(metrics.importlib.sys.modules, "wandb", fake := FakeTracker())
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    for project, expected in ((None, "theirs"), ("mine", "mine")):
        run = RunConfig(report_to=("wandb",), project=project)
        MetricsWriter(tmp_path, run=run, name="demo", config={}).close()
        assert fake.calls[-2][1]["project"] == expected


class FakeMlflow:
    """Stands for the module `mlflow`, its client, and the run and experiment that it returns."""

    run_id, experiment_id = "r1", "e1"

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.info = self.entities = self
        self.Metric = lambda *values: values

    def MlflowClient(self):  # noqa: N802
        return self

    def __getattr__(self, name):
        def call(*arguments, **named):
            self.calls.append((name, *arguments, *named.values()))
            return None if name == "get_experiment_by_name" else self

        return call


def test_a_run_in_mlflow_goes_on_under_names_that_it_takes(tmp_path, monkeypatch):
    fake = FakeMlflow()
    monkeypatch.setitem(metrics.importlib.sys.modules, "mlflow", fake)
    run = RunConfig(report_to=("mlflow",))
    for step in (1, 2):
        writer = MetricsWriter(tmp_path, run=run, name="demo", config={"seed": 1})
        writer.write(step, 0.5, {"eval/a/avg@1": 0.5, "rewards/f#2/mean": 1.0})
        writer.close()
    names = [name for name, *_ in fake.calls]
    one = ["log_batch", "set_terminated"]
    begun = ["get_experiment_by_name", "create_experiment", "create_run", "log_dict"]
    assert names == [*begun, *one, "update_run", *one]
    rows = next(rows for name, _, rows in (c for c in fake.calls if c[0] == "log_batch"))
    assert [(name, step) for name, _, _, step in rows] == [
        ("eval/a/avg_1", 1), ("rewards/f_2/mean", 1),
    ]  # fmt: skip


def test_a_tracker_that_fails_is_said_and_the_run_goes_on(tmp_path, monkeypatch):
    fakes = {"trackio": FakeTracker(), "wandb": FakeTracker()}
    for name, fake in fakes.items():
        monkeypatch.setitem(metrics.importlib.sys.modules, name, fake)
    writer = MetricsWriter(tmp_path, run=RunConfig(report_to=(*fakes,)), name="demo", config={})
    assert writer.write(1, 0.5, {"reward": 0.5}) == []
    monkeypatch.setattr(fakes["wandb"], "log", lambda *_: 1 / 0)
    (said,) = writer.write(2, 0.7, {"reward": 0.6})
    assert said.startswith("wandb gets no more rows, as metrics.jsonl does: ZeroDivisionError: ")
    assert writer.write(3, 0.9, {"reward": 0.7}) == []
    monkeypatch.setattr(fakes["trackio"], "finish", lambda: 1 / 0)
    (said,) = writer.close()
    assert said.startswith("trackio may lack the last rows, unlike metrics.jsonl: ZeroDivisionErr")
    assert [call[0] for call in fakes["trackio"].calls[1:]] == ["log"] * 3
    assert [*metrics.read(tmp_path)] == [1, 2, 3]
    monkeypatch.setattr(fakes["wandb"], "init", lambda **_: 1 / 0)
    said = refusal(MetricsWriter, tmp_path, run=RunConfig(report_to=("wandb",)), name="", config={})
    assert said.startswith("run.report_to: wandb: ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"project": "p"},
            "project has no effect: report_to does not name wandb or trackio or swanlab or mlflow",
        ),
        ({"run_group": "g"}, "run_group has no effect"),
        ({"entity": "e", "report_to": ("trackio",)}, "entity has no effect: .* name wandb"),
        ({"tags": ("t",), "report_to": ("trackio",)}, "tags has no effect: .* name wandb"),
    ],
)
def test_what_no_tracker_has_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        RunConfig(**given)


@pytest.mark.parametrize("text", ["{", "[]", '{"wandb": 1}'])
def test_what_names_the_runs_may_be_broken(tmp_path, monkeypatch, text):
    monkeypatch.setitem(metrics.importlib.sys.modules, "wandb", FakeTracker())
    (tmp_path / "trackers.json").write_text(text)
    with pytest.raises(UserError, match=r"trackers\.json: "):
        MetricsWriter(tmp_path, run=RunConfig(report_to=("wandb",)), name="run", config={})


def test_the_page_of_metrics_is_that_of_the_table():
    root = Path(__file__).parents[2]
    page = runpy.run_path(str(root / "scripts" / "metrics_page.py"))["page"]()
    assert (root / "docs" / "metrics.md").read_text() == page, "the script writes it anew"


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        ("completions/mean_terminated_length", "completions/*_terminated_length"),
        ("rewards/recipe:demo/std", "rewards/*/std"),
        ("eval/held_out/stderr", "eval/*/stderr"),
        ("eval/reward", "eval/reward"),
    ],
)
def test_a_metric_has_the_meaning_of_its_name(metric, name):
    assert meanings.meaning_of(metric).name == name
    assert meanings.meaning_of(f"mine/{metric}/more") is None
