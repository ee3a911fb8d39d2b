"""Reward functions in a run of real processes: who is called with what, and what is reported."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from rhymeflow.observe import metrics
from tests.runtime.logs import check_bound, reader, train
from tests.runtime.tiny import tiny_config

FUNCTIONS = """
import json
import os


def rank(prompts, completions, trainer_state, **columns):
    note("rank", prompts, completions, trainer_state.global_step)
    if os.path.exists(KILL):  # once: this process and the reward worker, which started it
        os.unlink(KILL)
        os.kill(os.getppid(), 9)
        os._exit(1)
    order = sorted(completions, key=lambda text: (len(text), text))
    return [order.index(text) / 2 for text in completions]


def brief(prompts, completions, **columns):
    note("brief", prompts, completions, None)
    return [-len(text) for text in completions]


def note(name, prompts, completions, step):
    with open(LOG, "a") as file:
        file.write(json.dumps([name, prompts, completions, step]) + "\\n")
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Groups of three and two spare responses; during a group call, the reward worker dies once."""
    path = tmp_path_factory.mktemp("group_rewards")
    log, kill = path / "calls.jsonl", path / "kill"
    kill.touch()
    (path / "judges.py").write_text(f"LOG, KILL = {str(log)!r}, {str(kill)!r}\n{FUNCTIONS}")
    functions = [
        {"function": f"{path}/judges.py:rank", "weight": 10.0},
        {"function": f"{path}/judges.py:brief", "per": "response", "weight": 0.5},
    ]
    config = tiny_config(
        path,
        reward={"functions": functions},
        data={"eval_size": 0},
        schedule={"max_staleness": 1, "extra_generations": 2},
    )
    summary = train(config)
    assert not kill.exists(), "the reward worker was never killed"
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    return config, summary, calls


def trained_texts(config) -> dict[int, list[tuple[str, list[str]]]]:
    """Of each step, the trained groups: prompt, and texts in the order of members."""
    log = reader(config)
    rows = log.query(
        "SELECT trained, group_id, prompt, text FROM trajectories JOIN groups USING (group_id)"
        " WHERE trained IS NOT NULL ORDER BY trained, group_id, member"
    )
    log.close()
    steps: dict[int, dict[int, tuple[str, list[str]]]] = {}
    for trained, group, prompt, text in rows:
        steps.setdefault(trained + 1, {}).setdefault(group, (prompt, []))[1].append(text)
    return {step: list(groups.values()) for step, groups in steps.items()}


def test_a_function_per_group_gets_each_trained_group_in_one_call_and_no_surplus(run):
    config, summary, calls = run
    assert summary.endings["consumed"] == 8
    called = Counter(
        (*set(prompts), *completions) for name, prompts, completions, _ in calls if name == "rank"
    )
    assert all(len(key) == 4 for key in called), "one prompt and three responses"
    trained = Counter(
        (prompt, *texts) for groups in trained_texts(config).values() for prompt, texts in groups
    )
    log = reader(config)
    ((judged,),) = log.query(
        "SELECT COUNT(DISTINCT group_id) FROM trajectories WHERE reward NOTNULL"
    )
    ((spare,),) = log.query("SELECT COUNT(*) FROM trajectories WHERE reward IS NULL")
    ((most,),) = log.query(
        "SELECT MAX(n) FROM (SELECT COUNT(reward) AS n FROM trajectories GROUP BY group_id)"
    )
    log.close()
    assert trained <= called
    # What may have been called for and was not used: the call that was killed, and groups that were
    # in flight when the run ended.
    assert judged + 1 <= called.total() <= summary.endings["consumed"] + 1 + 4
    assert most == 3, "nobody but the members of the call has a reward"
    assert spare > 0, "no response was surplus"


def test_a_function_per_response_gets_one_at_a_time_before_the_group_is_judged(run):
    _, _, calls = run
    seen: Counter[tuple[str, str]] = Counter()
    for name, prompts, completions, _ in calls:
        if name == "brief":
            assert len(completions) == len(prompts) == 1
            seen[prompts[0], completions[0]] += 1
        else:
            assert all(seen[pair] for pair in zip(prompts, completions, strict=True))


def test_metrics_of_each_function_are_of_the_trained_responses(run):
    config, _, _ = run
    rows = metrics.read(Path(config.run.output_dir))
    for step, groups in trained_texts(config).items():
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
        found = {name: rows[step][name] for name in expected}
        assert found == pytest.approx(expected), step
    assert set(rows) == {1, 2, 3, 4}


def test_the_step_is_the_published_version(run):
    _, _, calls = run
    steps = [step for name, _, _, step in calls if name == "rank"]
    assert steps[0] == 0
    assert max(steps) >= 2
    assert set(steps) <= {0, 1, 2, 3, 4}


def test_laws_hold_and_the_log_replays(run):
    check_bound(run[0])
