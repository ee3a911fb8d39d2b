"""A made-up run directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rhymeflow.core.events import Evaluated, VersionPublished
from rhymeflow.core.types import TrajectoryId
from rhymeflow.observe.metrics import MetricsWriter
from rhymeflow.store.writer import SqliteTrajectoryStore


def make_run(run_dir: Path, num_steps: int = 4, words: str | None = None) -> Path:
    """Two groups of two per step; member 0 begins one version early. Group 8 is left out, 9 open.

    Lengths: member 0 takes 10 + group tokens, member 1 takes 100 + group and is cut. From version 1
    on as many tokens were drafted as were made, in half the iterations. `words` stand in for every
    prompt and response.
    """
    store = SqliteTrajectoryStore(run_dir / "events.db")
    store.record(0.5, [Evaluated("rollout-0", 0, 0.25)])
    for step in range(num_steps):
        for group in (2 * step, 2 * step + 1):
            _put_group(store, group, max(step - 1, 0), step, words)
            store.put_consumed(group, version=step, members=(0, 1))
        store.record(10.0 * (step + 1), [VersionPublished(step + 1)])
        store.commit()
    _put_group(store, 2 * num_steps, 0, 0, words)
    store.put_ending(2 * num_steps, "aborted", version=1, reason="reward failed: boom")
    _put_group(store, 2 * num_steps + 1, num_steps, num_steps, words)
    store.record(10.0 * num_steps + 1, [Evaluated("rollout-0", num_steps, 0.75)])
    store.commit()
    store.close()

    writer = MetricsWriter(run_dir, report_to=(), name="run", config={})
    writer.write(0, 0.5, {"eval/reward": 0.25})
    for step in range(1, num_steps + 1):
        writer.write(
            step,
            10.0 * step,
            {
                "reward": step / 10,
                "rewards/exact/mean": step / 10,
                "rewards/exact/std": 0.25,
                "rewards/short/mean": 0.5,
                "rewards/short/std": 0.0,
                "step_time": 10.0,
                "staleness/mean": 0.5,
                "staleness/max": 1.0,
                "completions/mean_length": 55.0,
                "off_policy/mismatch_kl": 0.0125,
                "entropy": 1.234,
                "grad_norm": 10.5,
                "idle/rollout": 0.1,
                "idle/learner": 0.3,
                "draft/time_saved": 1.5,
                "lengths/seen_prompt_share": 0.75,
                "lengths/coverage": 0.8 + step / 1000,
                "lengths/explained_variance": 0.625,
                **({"lengths/rank_correlation": 0.875} if step > 1 else {}),
            },
        )
    writer.write(num_steps, 10.0 * num_steps + 1, {"eval/reward": 0.75})
    writer.close()
    return run_dir


def begun(run_dir: Path, **config: Any) -> None:
    """Let an attempt with these sections have begun."""
    store = SqliteTrajectoryStore(run_dir / "events.db")
    store.begin_attempt(json.dumps(config), now=0.0, started="2026-01-02T03:04:05Z")
    store.commit()
    store.close()


def _put_group(
    store: SqliteTrajectoryStore, group: int, first: int, last: int, words: str | None
) -> None:
    store.put_group(
        group,
        row=group,
        epoch=0,
        prompt=words or f"[b]what is {group}?",
        prompt_tokens=[1, 2, 3],
        columns={"answer": str(group)},
    )
    for member, version, length in ((0, first, 10 + group), (1, last, 100 + group)):
        trajectory = TrajectoryId(group, member)
        for start, end, made_under in ((0, 5, version), (5, length, last)):
            store.put_segment(
                trajectory,
                start=start,
                version=made_under,
                instance="rollout-0",
                steps=-(-(end - start) // 2) if made_under else end - start,
                drafted=end - start if made_under else 0,
                tokens=[7] * (end - start),
                logprobs=[-0.5] * (end - start),
            )
        store.put_finished(
            trajectory,
            length=length,
            reason="length" if member else "stop",
        )
        store.put_text(trajectory, words or f"[/red] it is {group}")
        store.put_reward(
            trajectory, reward=1.0 - member, components={"exact": 1.0 - member, "short": 0.5}
        )
