"""What a run enters in its store, made up."""

from __future__ import annotations

from rhymeflow.core.events import TrajectoryRewarded, VersionPublished
from rhymeflow.core.types import TrajectoryId
from rhymeflow.servers.trajectories import TrajectoryServer


def prompt_of(group: int) -> list[int]:
    """The tokens of a group's prompt, in every group others."""
    return list(range(40, 60 + group))


def put(
    server: TrajectoryServer,
    trajectory: TrajectoryId,
    start: int,
    tokens: list[int],
    *,
    version: int = 0,
    epoch: int = 0,
) -> None:
    """A segment, and its group if that is not there yet."""
    server.put_group(
        trajectory.group,
        row=0,
        epoch=epoch,
        prompt="p",
        prompt_tokens=prompt_of(trajectory.group),
        columns={},
    )
    server.put_segment(
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
    server: TrajectoryServer,
    row: int,
    prompt_ids: list[int],
    tokens: list[int],
    *,
    version: int,
    reward: float,
) -> None:
    """A held-out prompt and what was answered."""
    server.put_held_out(row, prompt="p", prompt_tokens=prompt_ids)
    server.put_evaluation(version, row, tokens=tokens, text="t", reward=reward)


def judge(server: TrajectoryServer, trajectory: TrajectoryId, length: int, reward: float) -> None:
    """The response is complete and has its reward; other events stand in the log too."""
    server.put_finished(trajectory, length=length, reason="stop", text="t")
    server.put_reward(trajectory, reward=reward, components={})
    server.record(0.0, [VersionPublished(1), TrajectoryRewarded(trajectory, reward)])
