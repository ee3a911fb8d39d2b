"""The examples run as a user runs them, and do what they say."""

from collections.abc import Callable
from pathlib import Path

import pytest

from examples import custom_strategy, plain_loop
from rhymeflow import build
from rhymeflow.config.load import dump_config
from tests.core.interleaving import Interleaving, a_plan
from tests.core.strategies.fleets import fleet, instance, new
from tests.runtime import plain
from tests.runtime.tiny import tiny_config

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
Run = Callable[..., str]
RULE = f"{EXAMPLES / 'custom_strategy.py'}:route"


# -- plain_loop.py --------------------------------------------------------------------------------


def test_the_plain_loop_runs(run_script, tmp_path):
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(dump_config(tiny_config(tmp_path)), encoding="utf-8")
    printed = run_script(EXAMPLES / "plain_loop.py", recipe, "--learner.max_steps", "2")
    assert [line.split("reward")[0] for line in printed.splitlines()] == [
        "step   1  ",
        "step   2  ",
    ]


def test_the_plain_loop_equals_the_reference_response_by_response_and_loss_by_loss(tmp_path):
    config = tiny_config(tmp_path, learner={"max_steps": 5})
    expected = plain.train(config)
    found = list(plain_loop.train(config))
    assert len({step["reward"] for step in expected}) > 1, "nothing happens in this run"
    for step, reference in zip(found, expected, strict=True):
        assert [each.completion_ids for each in step.batch] == reference["made"]
        for name in ("reward", "loss", "grad_norm"):
            assert getattr(step, name) == pytest.approx(reference[name], rel=1e-3, abs=1e-5)


# -- trainer.py, and the README's six lines -------------------------------------------------------


@pytest.mark.slow
def test_the_trainer_example_runs(run_script, tmp_path):
    text = (EXAMPLES / "trainer.py").read_text(encoding="utf-8")
    short = text.replace('"max_steps": 20', '"max_steps": 1, "groups_per_batch": 2')
    shorter = short.replace("rows[:64]", "rows[:4]")
    assert len({text, short, shorter}) == 3, "both were shortened"
    (tmp_path / "trainer.py").write_text(shorter, encoding="utf-8")
    assert " -> " in run_script(tmp_path / "trainer.py").splitlines()[-1]


@pytest.mark.slow
def test_the_readme_trains_with_six_lines_of_python(run_script, tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    assert len([line for line in text.splitlines() if line.strip()]) == 6
    short = text.replace('"max_steps": 20', '"max_steps": 1, "groups_per_batch": 2')
    assert short != text
    (tmp_path / "six.py").write_text(short, encoding="utf-8")
    assert "0 lost, 0 twice" in run_script(tmp_path / "six.py").splitlines()[-1]


# -- custom_strategy.py ---------------------------------------------------------------------------


def test_the_rule_fills_the_emptiest_cache_that_may_be_filled():
    there = [instance("a", running=2), instance("b", running=1), instance("c", accepts=False)]
    proposals = list(custom_strategy.route(fleet(there, [new(i) for i in range(3)])))
    assert [p.instance for p in proposals] == ["b", "a", "b"]
    there = [instance("old", version=0), instance("new", version=1, running=3, capacity=4)]
    waiting = [new(0, min_version=1), new(1, min_version=1), new(2)]
    proposals = list(custom_strategy.route(fleet(there, waiting)))
    assert [(p.trajectory.group, p.instance) for p in proposals] == [(0, "new"), (2, "old")]


def test_the_rule_carries_a_run_of_the_protocol(tmp_path):
    schedule = build.schedule(tiny_config(tmp_path, schedule={"routing": RULE}))
    body = Interleaving(a_plan(num_batches=5), schedule, capacities=(3, 5), crashes=1).run()
    assert len(body.batches) == 5


def test_the_rule_is_compared_in_the_simulator(run_script):
    small = ["--learner.groups_per_batch", "8", "--learner.max_steps", "4"]
    printed = run_script(EXAMPLES / "custom_strategy.py", *small)
    rules = [line.split()[0] for line in printed.splitlines()]
    assert rules == ["fewest_requests", "waterfall", "custom_strategy.py:route"]
    assert all("tokens/s" in line for line in printed.splitlines())
