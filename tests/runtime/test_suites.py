"""Runs that evaluate suites: several answers, functions and environments of their own."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from rhymeflow.core.events import Evaluated
from rhymeflow.evaluation.evaluate import evaluate
from rhymeflow.observe import metrics
from rhymeflow.observe.inspect import Question, inspect
from rhymeflow.suites.metrics import metrics_of
from tests.runtime import talkers, tiny
from tests.runtime.logs import check_replay, reader, train
from tests.runtime.test_resume import SYNCHRONOUS, audit, learned, resume, small, train_until

pytestmark = pytest.mark.slow

LAST = 4


def lengths(prompts, completions, completion_ids, **columns) -> list[float]:
    """Compares: the longest answer to a prompt gets most."""
    longest = max(map(len, completion_ids))
    assert len({str(prompt) for prompt in prompts}) == 1
    return [len(ids) / longest for ids in completion_ids]


MATH = {
    "name": "math", "n": 4, "temperature": 1.0, "steps": 1, "pass_threshold": 1.0,
    "answer_pattern": "[0-9]+",
    "functions": [
        {"function": f"{tiny.__file__}:even_digits", "per": "response"},
        {"function": f"{__file__}:lengths", "weight": 0.5},
    ],
}  # fmt: skip
GAME = {
    "name": "game", "steps": 4, "size": 1, "functions": [], "max_completion_length": 60,
    "environments": [{"environment": f"{talkers.__file__}:Opener"}],
}  # fmt: skip


def config_of(directory: Path, name: str = "run"):
    return small(
        directory,
        name,
        learner={"max_steps": LAST},
        eval={"suites": [MATH, GAME]},
        run={"best_metric": "eval/math/pass@4", "save_total_limit": 0},
        **SYNCHRONOUS,
    )


def found(config) -> dict[int, dict[str, float]]:
    """Of each version, what evaluations found."""
    rows = metrics.read(Path(config.run.output_dir))
    return {
        version: {name: value for name, value in row.items() if name.startswith("eval/")}
        for version, row in rows.items()
    }


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run that nothing happened to."""
    config = config_of(tmp_path_factory.mktemp("suites"))
    return config, train(config)


def test_each_suite_is_evaluated_when_it_is_due(straight):
    config, summary = straight
    check_replay(config)
    audit(Path(config.run.output_dir))
    log = reader(config)
    due = {("held_out", v) for v in (0, 2, 4)} | {("game", v) for v in (0, 4)}
    due |= {("math", v) for v in range(5)}
    evaluated = [e.event for e in log.events() if isinstance(e.event, Evaluated)]
    assert {(e.suite, e.version) for e in evaluated} == due
    assert len(evaluated) == len(due)
    counts = log.query("SELECT suite, version, COUNT(*) FROM evaluations GROUP BY 1, 2")
    size = {"held_out": 2, "math": 8, "game": 1}
    assert {(suite, version): n for suite, version, n in counts} == {
        (suite, version): size[suite] for suite, version in due
    }
    rewards = log.query("SELECT suite, version, AVG(reward) FROM evaluations GROUP BY 1, 2")
    told = {(e.suite, e.held): e.reward for e in evaluated}
    assert {(s, v): pytest.approx(mean) for s, v, mean in rewards} == told
    prompts = dict(log.query("SELECT suite, prompt FROM groups WHERE row = 0 AND group_id < 0"))
    assert prompts["game"].startswith(prompts["math"])
    assert prompts["game"].endswith("="), "what the environment said first"
    log.close()
    assert {v for v, row in found(config).items() if "eval/math/maj@4" in row} == {*range(5)}
    assert set(summary.evaluations) == {"math", "game"}
    assert [version for version, _ in summary.eval_rewards] == [0, 2, 4]


def test_the_figures_are_those_of_rhymeflow_eval(straight):
    """Of the last version, whose checkpoint there is: answers, rewards, votes, lengths."""
    config, _ = straight
    checkpoint = Path(config.run.output_dir) / "checkpoints" / f"step-{LAST}"
    model = config.model.model_copy(update={"name": str(checkpoint)})
    results = evaluate(config.model_copy(update={"model": model}))
    expected = {}
    for result in results:
        expected |= metrics_of(result.suite.name, result.figures)
    row = found(config)[LAST]
    held_out = {name for name in row if name == "eval/reward" or "/held_out/" in name}
    assert {name: row[name] for name in row.keys() - held_out} == pytest.approx(expected)


def test_the_best_by_the_figure_that_was_chosen_is_told_and_shown(straight):
    config, _ = straight
    output = io.StringIO()
    inspect(Path(config.run.output_dir), Question(), Console(file=output, width=100))
    assert "math pass@4" in output.getvalue()
    summary = json.loads((Path(config.run.output_dir) / "summary.json").read_text())
    assert set(summary["evaluations"]["game"]) == {"0", "4"}


def test_a_run_that_is_killed_in_an_evaluation_finds_what_it_would_have_found(
    straight, monkeypatch, tmp_path
):
    """One suite is over, of another some answers are complete: those are not generated again."""
    config = config_of(Path(straight[0].run.output_dir).parent, "killed")
    complete = set()

    def dies(controller):
        running = controller.evaluations._in_progress.get(("math", 2))
        if running is None:
            return False
        groups = {group: controller.in_flight[group] for group in running.groups.values()}
        complete.update((g, m) for g, group in groups.items() for m in group.reasons)
        return bool(complete)

    train_until(monkeypatch, config, dies)
    resume(Path(config.run.output_dir))
    log = reader(config)
    spans = log.query("SELECT group_id, member, MAX(start) FROM segments WHERE group_id < 0")
    of_math = dict(log.query("SELECT group_id, ending FROM groups WHERE suite = 'math'"))
    log.close()
    assert spans
    assert set(of_math.values()) == {"evaluated"}
    assert len(of_math) == 5 * 2, "no group of the second evaluation was begun anew"
    check_replay(config)
    audit(Path(config.run.output_dir))
    for one, other in zip(
        found(config).values(), found(straight[0]).values(),
        strict=True,
    ):  # fmt: skip
        assert one == pytest.approx(other)
    assert learned(Path(config.run.output_dir)) == learned(Path(straight[0].run.output_dir))
