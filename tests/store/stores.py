"""What a run enters in its store, made up."""

from __future__ import annotations

from rhymeflow.core.events import TrajectoryRewarded, VersionPublished
from rhymeflow.core.types import TrajectoryId
from rhymeflow.store.writer import SqliteTrajectoryStore


def prompt_of(group: int) -> list[int]:
    """The tokens of a group's prompt, in every group others."""
    return list(range(40, 60 + group))


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
    store.put_segment(
        trajectory,
        start=start,
        version=version,
        instance="r",
        steps=1,
        drafted=0,
        tokens=tokens,
        logprobs=[0.0] * len(tokens),
    )


def answer(
    store: SqliteTrajectoryStore,
    row: int,
    prompt_ids: list[int],
    tokens: list[int],
    *,
    version: int,
    reward: float,
) -> None:
    """A held-out prompt and what was answered."""
    store.put_held_out("held_out", row, prompt="p", prompt_tokens=prompt_ids)
    store.put_evaluation(version, "held_out", row, 0, tokens=tokens, text="t", reward=reward)


def judge(
    store: SqliteTrajectoryStore, trajectory: TrajectoryId, length: int, reward: float
) -> None:
    """The response is complete and has its reward; other events stand in the log too."""
    store.put_finished(trajectory, length=length, reason="stop")
    store.put_reward(trajectory, reward=reward, components={})
    store.record(0.0, [VersionPublished(1), TrajectoryRewarded(trajectory, reward)])
