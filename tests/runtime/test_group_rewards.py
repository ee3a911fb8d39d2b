"""Reward functions in a run of real processes: who is called with what, and what is reported."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from rhymeflow.observe import metrics
from tests.runtime.logs import check_bound, reader, train
from tests.runtime.tiny import tiny_config

FUNCTIONS = """
import json


def rank(prompts, completions, trainer_state, **columns):
    note("rank", prompts, completions, trainer_state.global_step)
    order = sorted(completions, key=lambda text: (len(text), text))
    return [order.index(text) / 2 for text in completions]


def brief(prompts, completions, **columns):
    note("brief", prompts, completions, None)
    return [-len(text) for text in completions]


def note(name, prompts, completions, step):
    with open(LOG, "a") as file:
        file.write(json.dumps([name, prompts, completions, step]) + "\\n")
"""


def trained_texts(log) -> dict[int, list[tuple[str, list[str]]]]:
    """Of each step, the trained groups: prompt, and texts in the order of members."""
    steps: dict[int, dict[int, tuple[str, list[str]]]] = {}
    for trained, group, prompt, text in log.query(
        "SELECT trained, group_id, prompt, text FROM trajectories JOIN groups USING (group_id)"
        " WHERE trained IS NOT NULL ORDER BY trained, group_id, member"
    ):
        steps.setdefault(trained + 1, {}).setdefault(group, (prompt, []))[1].append(text)
    return {step: list(groups.values()) for step, groups in steps.items()}


def test_groups_of_three_and_two_spare_responses(tmp_path):
    calls_file = tmp_path / "calls.jsonl"
    (tmp_path / "judges.py").write_text(f"LOG = {str(calls_file)!r}\n{FUNCTIONS}")
    functions = [
        {"function": f"{tmp_path}/judges.py:rank", "weight": 10.0},
        {"function": f"{tmp_path}/judges.py:brief", "per": "response", "weight": 0.5},
    ]
    config = tiny_config(
        tmp_path,
        reward={"functions": functions},
        data={"eval_size": 0},
        schedule={"max_staleness": 1, "extra_generations": 2},
    )
    train(config)
    check_bound(config)
    calls = [json.loads(line) for line in calls_file.read_text().splitlines()]
    with closing(reader(config)) as log:
        steps = trained_texts(log)
        ((spare,),) = log.query("SELECT COUNT(*) FROM trajectories WHERE reward IS NULL")
        ((most,),) = log.query(
            "SELECT MAX(n) FROM (SELECT COUNT(reward) AS n FROM trajectories GROUP BY group_id)"
        )
    assert spare > 0, "no response was surplus"
    assert most == 3, "nobody but the members of the call has a reward"

    alone: Counter[tuple[str, str]] = Counter()
    together: Counter[tuple[str, ...]] = Counter()
    for name, prompts, completions, _ in calls:
        if name == "brief":
            assert len(completions) == len(prompts) == 1
            alone[prompts[0], completions[0]] += 1
        else:
            assert len(completions) == 3
            assert all(alone[pair] for pair in zip(prompts, completions, strict=True))
            together[(*set(prompts), *completions)] += 1
    assert together >= Counter(
        (prompt, *texts) for groups in steps.values() for prompt, texts in groups
    )
    published = [step for name, _, _, step in calls if name == "rank"]
    assert published[0] == 0
    assert {2} <= set(published) <= {0, 1, 2, 3, 4}

    rows = metrics.read(Path(config.run.output_dir))
    assert set(rows) == set(steps) == {1, 2, 3, 4}
    for step, groups in steps.items():
        rank, brief = [], []
        for _, texts in groups:
            order = sorted(texts, key=lambda text: (len(text), text))
            rank += [order.index(text) / 2 for text in texts]
            brief += [-len(text) for text in texts]
        expected = {
            "rewards/rank/mean": np.mean(rank),
            "rewards/rank/std": np.std(rank, ddof=1),
            "rewards/brief/mean": np.mean(brief),
            "rewards/brief/std": np.std(brief, ddof=1),
            "reward": np.mean(10 * np.array(rank) + 0.5 * np.array(brief)),
        }
        assert {name: rows[step][name] for name in expected} == pytest.approx(expected), step
