"""Runs that evaluate suites: several answers, functions and environments of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from rhymeflow.core.events import Evaluated
from rhymeflow.evaluation.evaluate import evaluate
from rhymeflow.observe import metrics
from rhymeflow.suites.figures import metrics_of
from tests.runtime import talkers, tiny
from tests.runtime.logs import audit, check_replay, reader, train
from tests.runtime.test_resume import SYNCHRONOUS, small

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
    train(config)
    return config


def test_each_suite_is_evaluated_when_it_is_due(straight):
    check_replay(straight)
    audit(Path(straight.run.output_dir))
    log = reader(straight)
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
    log.close()


def test_the_figures_are_those_of_rhymeflow_eval(straight):
    """Of the last version, whose checkpoint there is: answers, rewards, votes, lengths."""
    checkpoint = Path(straight.run.output_dir) / "checkpoints" / f"step-{LAST}"
    model = straight.model.model_copy(update={"name": str(checkpoint)})
    results = evaluate(straight.model_copy(update={"model": model}))
    expected = {}
    for result in results:
        expected |= metrics_of(result.suite.name, result.figures)
    row = found(straight)[LAST]
    held_out = {name for name in row if name == "eval/reward" or "/held_out/" in name}
    assert {name: row[name] for name in row.keys() - held_out} == pytest.approx(expected)
