"""Runs that evaluate suites: several answers, functions and environments of their own."""

from pathlib import Path

import pytest

from rhymeflow.evaluation.evaluate import evaluate
from rhymeflow.observe import metrics
from rhymeflow.suites.figures import metrics_of
from tests.runtime import even, talkers
from tests.runtime.logs import train
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
        {"function": f"{even.__file__}:even_digits", "per": "response"},
        {"function": f"{__file__}:lengths", "weight": 0.5},
    ],
}  # fmt: skip
GAME = {
    "name": "game", "steps": 4, "size": 1, "functions": [], "max_completion_length": 60,
    "environments": [{"environment": f"{talkers.__file__}:Opener"}],
}  # fmt: skip


def test_the_figures_are_those_of_rhymeflow_eval(tmp_path):
    """Of the last version, whose checkpoint there is: answers, rewards, votes, lengths."""
    run = {"best_metric": "eval/math/pass@4", "save_total_limit": 0}
    suites = {"eval": {"suites": [MATH, GAME]}}
    straight = small(tmp_path, learner={"max_steps": LAST}, run=run, **suites, **SYNCHRONOUS)
    train(straight)
    checkpoint = Path(straight.run.output_dir) / "checkpoints" / f"step-{LAST}"
    model = straight.model.model_copy(update={"name": str(checkpoint)})
    results = evaluate(straight.model_copy(update={"model": model}))
    expected = {}
    for result in results:
        expected |= metrics_of(result.suite.name, result.figures)
    row = metrics.read(Path(straight.run.output_dir))[LAST]
    assert set(expected) == {name for name in row if name.startswith(("eval/math/", "eval/game/"))}
    assert {name: row[name] for name in expected} == pytest.approx(expected)
