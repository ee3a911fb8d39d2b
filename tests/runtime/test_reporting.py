"""What is shown of a step that has ended."""

import io
from types import SimpleNamespace

from rich.console import Console

from rhymeflow.config.load import build_config
from rhymeflow.observe.progress import Progress, ProgressState, _times
from rhymeflow.runtime.reporting import Reporter
from rhymeflow.suites.figures import headlines
from rhymeflow.workers.messages import BatchTrained, Publication, RewardComputed


class Shown(Progress):
    """Keeps the state that it is shown last."""

    state: ProgressState

    def update(self, state: ProgressState) -> None:
        self.state = state


METRICS = {"reward": 0.5, "num_tokens": 100.0, "staleness/mean": 0.0, "staleness/max": 0.0}


def reporter_of(fields, progress, clock, rows) -> Reporter:
    """A reporter whose rows come into `rows`, by version."""
    writer = SimpleNamespace(write=lambda step, time, row: rows.update({step: row}) or [])
    config = build_config(fields, where="test")
    return Reporter(config, writer, progress, clock=clock)  # type: ignore[arg-type]


def end_step(reporter, version=0, **metrics) -> None:
    trained = BatchTrained(version, METRICS | metrics, 0.5)
    reporter.end_step(trained, Publication(0.5), {}, coordinator=0.0, store=0.0)


def test_a_step_in_which_a_worker_was_replaced_is_as_long_as_it_was():
    now, rows = 0.0, {}
    progress = Shown(Console(file=io.StringIO()))
    fields = {"schedule.name": "synchronous", "learner.max_steps": 9}
    reporter = reporter_of(fields, progress, lambda: now, rows)
    now = 5.0
    reporter.begin_training()
    now = 12.0
    reporter.begin_training()  # another instance is there
    now = 15.0
    end_step(reporter)
    assert rows[1]["step_time"] == 10.0
    reporter.show()
    assert progress.state.trained_tokens_per_s == 10.0
    assert progress.state.left == 10.0 * 8


def test_what_reward_functions_log_replaces_no_metric_of_the_run():
    """`eval/reward` chooses the best checkpoint, and rows are found by their `step`."""
    rows: dict[int, dict[str, float]] = {}
    fields = {"eval.suites": [{"name": "math", "source": "math.jsonl"}]}
    out = io.StringIO()
    reporter = reporter_of(fields, Progress(Console(file=out, width=200)), lambda: 0.0, rows)
    reporter.begin_training()
    names = ["step", "time", "epoch", "reward", "loss", "rewards/f/mean", "endings/aborted"]
    names += ["eval/reward", "eval/math/avg@1", "distance"]
    logged = [(name, 1000.0) for name in names]
    held_out = [(name, 9.0) for name in ("reward", "math/avg@1", "a/b")]
    reporter.log(RewardComputed("a", [], [], noted=logged), "")
    reporter.log(RewardComputed("b", [], [], noted=held_out), "eval/")
    own = {"reward": 0.5, "loss": 0.1, "rewards/f/mean": 0.5}
    for version in (0, 1):
        end_step(reporter, version, **own)
    assert rows[1].items() >= own.items()
    assert not rows[1].keys() & {"step", "time", "epoch", "eval/reward", "eval/math/avg@1"}
    assert {name: rows[1][f"logged/{name}"] for name in names[:-1]} == dict(logged[:-1])
    assert (rows[1]["distance"], rows[1]["endings/aborted"]) == (1000.0, 0.0)
    assert (rows[1]["eval/logged/reward"], rows[1]["eval/logged/math/avg@1"]) == (9.0, 9.0)
    assert headlines(rows[1]) == {}, "eval/a/b is no suite's"
    assert out.getvalue().count("warning: log_metric('reward')") == 2, "of both"


def test_an_emulated_run_has_the_time_of_its_cluster():
    """Ten seconds of it pass in one of this machine, by whose clock the run is driven."""
    now, rows = 100.0, {}
    progress = Shown(Console(file=io.StringIO()))
    fields = {
        "emulation.profile": "qwen2.5-7b-h20",
        "emulation.devices": 8,
        "emulation.time_scale": 10,
        "learner.max_steps": 9,
    }
    reporter = reporter_of(fields, progress, lambda: now, rows)
    now = 102.0
    reporter.begin_training()
    assert "emulated: 8 devices of qwen2.5-7b-h20" in progress.state.message
    now = 105.0
    end_step(reporter)  # the learner was busy for a second of the cluster
    assert (reporter.now, reporter.time) == (5.0, 50.0)
    assert (rows[1]["step_time"], rows[1]["idle/learner"]) == (30.0, 1 - 1 / 30)
    reporter.show()
    assert (progress.state.elapsed, progress.state.left) == (50.0, 30.0 * 8)
    assert "4:00 left (0:24 here)" in _times(progress.state)
