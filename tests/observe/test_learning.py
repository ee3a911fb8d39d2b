"""Verdicts on learning: what each is given for, and that a run that learns gets none."""

import re
from pathlib import Path
from typing import Any

import pytest

from rhymeflow.config.load import read_config
from rhymeflow.observe.learning import WINDOW, Learning

GOOD = {
    "reward": 0.5, "reward_std": 0.5, "frac_reward_zero_std": 0.4, "grad_norm": 0.1, "kl": 0.01,
    "completions/clipped_ratio": 0.02, "entropy": 0.3, "clip_ratio/region_mean": 0.01,
    "off_policy/mismatch_kl": 0.001, "rewards/recipe:demo/mean": 0.5, "turns/mean": 3.0,
    "tools/call_frequency": 0.7, "endings/consumed": 16.0, "endings/filtered": 4.0,
    "endings/aborted": 0.0, "skipped_steps": 0.0,
}  # fmt: skip
"""A step of a run that learns. Endings are counts, which grow."""


def after(*steps: dict[str, Any], recipe: str = "demo", more: dict[str, str] | None = None):
    """A run whose first steps are good, and then have these figures."""
    learning = Learning(read_config(recipe, more or {}))
    for number, step in enumerate([*[{}] * WINDOW, *steps], 1):
        counts = {n: number * v for n, v in GOOD.items() if n.startswith("endings/")}
        learning.add(number, {**GOOD, **counts, **step})
    return learning


def names(learning: Learning) -> list[str]:
    return [verdict.name for verdict in learning.now]


def endings(kind: str, more: float) -> list[dict[str, float]]:
    """So many more of a kind with each step."""
    start = WINDOW * GOOD[f"endings/{kind}"]
    return [{f"endings/{kind}": start + more * i} for i in range(1, WINDOW + 1)]


CASES: dict[str, list[dict[str, Any]]] = {
    "gradient not finite": [{"grad_norm": None, "skipped_steps": 1.0}],
    "gradient 0": [{"grad_norm": 0.0}] * WINDOW,
    "reward collapsed": [{"reward": 0.1}] * WINDOW,
    "rewards constant": [{"reward": 0.5, "reward_std": 0.0, "frac_reward_zero_std": 1.0}] * WINDOW,
    "no spread of rewards": [{"frac_reward_zero_std": 0.95}] * WINDOW,
    "responses cut": [{"completions/clipped_ratio": 0.8}] * WINDOW,
    "entropy gone": [{"entropy": 0.001}] * WINDOW,
    "tokens clipped": [{"clip_ratio/region_mean": 0.2}] * WINDOW,
    "mismatch": [{"off_policy/mismatch_kl": 0.04}] * WINDOW,
    "reference runs away": [{"kl": 3.0}] * WINDOW,
    "groups filtered": endings("filtered", 200.0),
    "rewards fail": [{"rewards/failed": 4.0}] * WINDOW,
    "held-out reward falls": [
        {"eval/reward": 0.8, "eval/held_out/stderr": 0.03},
        {"eval/reward": 0.6, "eval/held_out/stderr": 0.04},
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_a_verdict_is_given_for_its_cause(name):
    assert name in names(after(*CASES[name]))
    if CASES[name][1:]:
        assert name not in names(after(CASES[name][0])), "one step is no evidence"
    over = [{"eval/reward": 0.8, "eval/held_out/stderr": 0.03}] * 2 * WINDOW
    assert name not in names(after(*CASES[name], *over))


def test_a_run_that_learns_is_not_accused():
    rising = [
        {
            "reward": 0.5 + 0.02 * i,
            "frac_reward_zero_std": 0.4 + 0.025 * i,
            "entropy": 0.3 - 0.012 * i,
        }
        for i in range(24)
    ]
    solved = {"reward": 1.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0, "entropy": 0.001}
    learning = after(*rising, *[{**solved, "grad_norm": 0.0}] * 9)
    assert names(learning) == []


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce_plus_plus"])
def test_responses_that_are_not_compared_in_their_group_need_no_spread(algorithm):
    flat = [{"frac_reward_zero_std": 1.0}] * WINDOW
    assert names(after(*flat, more={"learner.algorithm": algorithm})) == []
    assert names(after(*flat)) == ["no spread of rewards"]


def taught(divergences: list[float], **more: Any) -> list[str]:
    """The verdicts on a run that learns from a teacher alone."""
    config = read_config("distill", {"reward.functions": "[]", "data.eval_size": "0"})
    learning = Learning(config)
    unrewarded = {name: value for name, value in GOOD.items() if "reward" not in name}
    for step, divergence in enumerate(divergences, 1):
        late = more if step > WINDOW else {}
        learning.add(step, {**unrewarded, "distillation/divergence": divergence, **late})
    return names(learning)


def test_a_run_without_rewards_is_judged_by_its_teacher():
    assert taught([0.2, 0.1, 0.15, 0.12] * 30) == ["teacher not approached"]
    assert taught([0.2 - step / 1000 for step in range(120)]) == []
    assert taught([0.2] * 2 * WINDOW, entropy=0.001) == ["entropy gone"]
    assert taught([0.2 - step / 100 for step in range(2 * WINDOW)], entropy=0.001) == []
    assert taught([0.2] * 2 * WINDOW, grad_norm=0.0) == ["gradient 0"]
    flat = [{"reward": 0.0, "reward_std": 0.0}] * 2 * WINDOW
    program = Learning(read_config("agent"))
    for step, row in enumerate(flat, 1):
        program.add(step, {**GOOD, **row, "rewards/agent/mean": 0.0})
    assert "rewards all 0" in names(program), "a program's rewards are some"


def test_rewards_that_were_never_anything_else_are_0():
    nothing = {**GOOD, "reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0}
    learning = Learning(read_config("demo"))
    found = [learning.add(step, nothing) for step in range(1, WINDOW + 1)]
    assert [[verdict.name for verdict in each] for each in found] == [[], [], [], ["rewards all 0"]]


def test_a_policy_that_waits_for_its_critic_is_not_accused():
    ppo = {"learner.algorithm": "ppo", "learner.critic_warmup_steps": "9"}
    learning = Learning(read_config("demo", ppo))
    for step in range(1, 14):
        news = learning.add(step, {**GOOD, "grad_norm": 0.0})
        assert [verdict.name for verdict in news] == ["gradient 0"] * (step == 9 + WINDOW)


def test_groups_may_be_filtered_without_end():
    learning = Learning(read_config("demo"))
    most = WINDOW * read_config("demo").learner.groups_per_batch
    assert [learning.filtered(count) for count in range(most)] == [[]] * most
    (verdict,) = learning.filtered(most)
    assert verdict.name == "groups filtered"
    assert verdict.said.startswith(f"all {most} groups since the last step")
    assert learning.filtered(most + 1) == [], "it was said"
    assert [each.name for each in learning.at_end()] == ["groups filtered"]
    learning.add(1, GOOD)
    assert learning.now == []


def test_a_reward_that_stays_as_it_was_is_named_after_a_hundred_steps():
    noise = (0.02, -0.03, 0.01, 0.0)
    flat = [{"reward": 0.3 + noise[i % 4]} for i in range(120)]
    rising = [{"reward": 0.3 + i / 2000 + noise[i % 4]} for i in range(120)]
    assert names(after(*flat)) == ["reward does not rise"]
    assert names(after(*flat[:80])) == []
    assert names(after(*rising)) == []


def test_a_low_reward_that_varies_has_not_collapsed():
    few = [{"reward": reward} for reward in (0.9, 0.0, 0.6, 0.1, 0.3, 0.0, 0.1, 0.4)]
    assert "reward collapsed" not in names(after(*few))


def test_what_is_never_used_is_named():
    steps = [{"tools/call_frequency": 0.0, "turns/mean": 1.0}] * WINDOW
    assert "tools unused" in names(after(*steps, recipe="smollm2_tools"))
    assert "turns unused" in names(after(*steps, recipe="guess"))
    assert names(after(*steps)) == []
    assert "turns unused" not in names(after(*steps, recipe="agent")), "one call may be enough"
    two = {"reward.functions": "[recipe:demo, len]"}
    assert "reward function returns None" in names(after({}, more=two))


def test_a_verdict_is_news_once():
    learning = after()
    news = [learning.add(9 + i, {**GOOD, "kl": 4.0}) for i in range(2 * WINDOW)]
    assert [[verdict.name for verdict in each] for each in news].count(["reference runs away"]) == 1
    assert all(not each for each in news[WINDOW:])


def test_what_held_before_a_resume_is_no_news():
    learning, row = Learning(read_config("demo")), {**GOOD, "kl": 4.0}
    for step in range(1, WINDOW + 1):
        learning.take(step, row)
    assert [verdict.name for verdict in learning.judge()] == ["reference runs away"]
    assert learning.add(WINDOW + 1, row) == []


def test_a_held_out_change_is_compared_with_its_noise():
    def ends(first: float, last: float) -> list[str]:
        learning = after({"eval/reward": first, "eval/held_out/stderr": 0.1},
                         {"eval/reward": last, "eval/held_out/stderr": 0.1})  # fmt: skip
        return [verdict.name for verdict in learning.at_end()]

    assert ends(0.125, 0.25) == ["held-out change within noise"]
    assert ends(0.125, 0.6) == []


def test_every_verdict_has_its_place_in_the_docs():
    root = Path(__file__).parents[2]
    source = (root / "rhymeflow/observe/learning.py").read_text()
    page = (root / "docs/troubleshooting.md").read_text()
    given = set(re.findall(r'Verdict\("([^"]+)"', source))
    assert {*CASES, "rewards all 0"} < given
    assert given == set(re.findall(r"^## (.*)$", page, re.MULTILINE))
