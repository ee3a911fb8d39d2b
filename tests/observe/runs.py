"""A made-up run directory, and what puts more into one."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rhymeflow.config.load import build_config
from rhymeflow.config.run import RunConfig
from rhymeflow.core.events import Evaluated, VersionPublished
from rhymeflow.core.types import TrajectoryId
from rhymeflow.observe.metrics import MetricsWriter
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.store.stores import finished, group, segment


@contextmanager
def stored(run_dir: Path) -> Iterator[SqliteTrajectoryStore]:
    """A store whose rows are there afterwards."""
    store = SqliteTrajectoryStore(run_dir / "events.db")
    yield store
    store.commit()
    store.close()


def begun(run_dir: Path, started: str = "2026-01-02T03:04:05Z", **config: Any) -> Path:
    """Let an attempt with these sections have begun."""
    with stored(run_dir) as store:
        store.begin_attempt(json.dumps(config), now=0.0, started=started)
    return run_dir


def make_run(run_dir: Path, num_steps: int = 4, words: str | None = None) -> Path:
    """Two groups of two per step; member 0 begins one version early. Group 8 is left out, 9 open.

    Lengths: member 0 takes 10 + group tokens, member 1 takes 100 + group and is cut. From version 1
    on as many tokens were drafted as were made, in half the iterations. `words` stand in for every
    prompt and response."""
    with stored(run_dir) as store:
        store.record(0.5, [Evaluated("rollout-0", 0, 0.25)])
        for step in range(num_steps):
            for number in (2 * step, 2 * step + 1):
                _put_group(store, number, max(step - 1, 0), step, words)
                store.put_consumed(number, version=step, members=(0, 1))
            store.record(10.0 * (step + 1), [VersionPublished(step + 1)])
            store.commit()
        _put_group(store, 2 * num_steps, 0, 0, words)
        store.put_ending(2 * num_steps, "aborted", version=1, reason="reward failed: boom")
        _put_group(store, 2 * num_steps + 1, num_steps, num_steps, words)
        store.record(10.0 * num_steps + 1, [Evaluated("rollout-0", num_steps, 0.75)])
    _write_metrics(run_dir, num_steps)
    return run_dir


def made(run_dir: Path, started: str = "2026-03-01T10:00:00Z", **fields: Any) -> Path:
    """The same with an attempt; groups of two, 16 trajectories in 41 s."""
    run_dir.mkdir(parents=True)
    config = build_config({"max_steps": 4, "output_dir": str(run_dir), **fields}, where="test")
    begun(make_run(run_dir), started, **{**json.loads(config.model_dump_json()), "name": "toy"})
    return run_dir


def _put_group(
    store: SqliteTrajectoryStore, number: int, first: int, last: int, words: str | None
) -> None:
    prompt = words or f"[b]what is {number}?"
    group(store, number, prompt=prompt, prompt_tokens=[1, 2, 3], columns={"answer": str(number)})
    for member, version, length in ((0, first, 10 + number), (1, last, 100 + number)):
        which = TrajectoryId(number, member)
        for start, end, made_under in ((0, 5, version), (5, length, last)):
            count = end - start
            made = {"steps": -(-count // 2), "drafted": count} if made_under else {"steps": count}
            segment(store, which, count, start=start, version=made_under, **made)
        text, reason = words or f"[/red] it is {number}", "length" if member else "stop"
        finished(store, which, length, 1.0 - member, reason, text, exact=1.0 - member, short=0.5)


def _write_metrics(run_dir: Path, num_steps: int) -> None:
    writer = MetricsWriter(run_dir, run=RunConfig(report_to=()), name="run", config={})
    writer.write(0, 0.5, {"eval/reward": 0.25})
    for step in range(1, num_steps + 1):
        figures = {
            "reward": step / 10, "rewards/exact/mean": step / 10, "rewards/exact/std": 0.25,
            "rewards/short/mean": 0.5, "rewards/short/std": 0.0, "step_time": 10.0,
            "staleness/mean": 0.5, "staleness/max": 1.0, "completions/mean_length": 55.0,
            "off_policy/mismatch_kl": 0.0125, "entropy": 1.234, "grad_norm": 10.5,
            "idle/rollout": 0.1, "idle/learner": 0.3, "draft/time_saved": 1.5,
            "lengths/explained_variance": 0.6 + step / 100, "lengths/rank_correlation": None,
        }  # fmt: skip
        writer.write(step, 10.0 * step, figures)
    writer.write(num_steps, 10.0 * num_steps + 1, {"eval/reward": 0.75})
    writer.close()
