"""What a run enters in its store, made up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rhymeflow.core.events import TrajectoryRewarded, VersionPublished
from rhymeflow.core.types import TrajectoryId
from rhymeflow.histospec.noise_sharing import EVALUATION_EPOCH
from rhymeflow.store.writer import SqliteTrajectoryStore


def prompt_of(group: int) -> list[int]:
    """The tokens of a group's prompt, in every group others."""
    return list(range(40, 60 + group))


def segment(
    store: SqliteTrajectoryStore,
    trajectory: TrajectoryId,
    tokens: Sequence[int],
    logprobs: Sequence[float] | None = None,
    **other: Any,
) -> None:
    """Tokens of an instance."""
    fields = {"start": 0, "version": 0, "instance": "r", "steps": 1, "drafted": 0, **other}
    given = [0.0] * len(tokens) if logprobs is None else logprobs
    store.put_segment(trajectory, tokens=tokens, logprobs=given, **fields)


def put(
    store: SqliteTrajectoryStore,
    trajectory: TrajectoryId,
    start: int,
    tokens: list[int],
    *,
    version: int = 0,
    epoch: int = 0,
) -> None:
    """A segment, and its group if that is not there yet."""
    store.put_group(
        trajectory.group,
        row=0,
        epoch=epoch,
        prompt="p",
        prompt_tokens=prompt_of(trajectory.group),
        columns={},
    )
    segment(store, trajectory, tokens, start=start, version=version)


def answered(
    store: SqliteTrajectoryStore,
    group: int,
    rewards: Sequence[float],
    *,
    row: int = 0,
    version: int = 0,
    suite: str = "held_out",
    prompt_ids: Sequence[int] = (1,),
    tokens: Sequence[int] = (1,),
) -> None:
    """A suite's group, whose evaluation is over."""
    store.put_group(
        group, row=row, epoch=EVALUATION_EPOCH, prompt="p", prompt_tokens=prompt_ids, columns={},
        suite=suite, version=version,
    )  # fmt: skip
    for member, reward in enumerate(rewards):
        trajectory = TrajectoryId(group, member)
        named = {"instance": "rollout-0", "steps": len(tokens)}
        segment(store, trajectory, tokens, version=version, **named)
        store.put_finished(trajectory, length=len(tokens), reason="stop")
        store.put_text(trajectory, "t")
        store.put_reward(trajectory, reward=reward, components={})
    store.put_evaluated(group, version)


def judge(
    store: SqliteTrajectoryStore, trajectory: TrajectoryId, length: int, reward: float
) -> None:
    """The response is complete and has its reward; other events stand in the log too."""
    store.put_finished(trajectory, length=length, reason="stop")
    store.put_reward(trajectory, reward=reward, components={})
    store.record(0.0, [VersionPublished(1), TrajectoryRewarded(trajectory, reward)])
