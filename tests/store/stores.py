"""What a run enters in its store, made up."""

from collections.abc import Sequence
from typing import Any

from rhymeflow.core.events import TrajectoryRewarded, VersionPublished
from rhymeflow.core.types import TrajectoryId
from rhymeflow.histospec.noise_sharing import EVALUATION_EPOCH
from rhymeflow.store.writer import SqliteTrajectoryStore as Store


def prompt_of(group: int) -> list[int]:
    """The tokens of a group's prompt, in every group others."""
    return list(range(40, 60 + group))


def group(store: Store, number: int, **fields: Any) -> None:
    """A prompt, of row `number` if nothing else is said."""
    defaults = {"row": number, "epoch": 0, "prompt": "p", "prompt_tokens": [1], "columns": {}}
    store.put_group(number, **defaults | fields)


def segment(
    store: Store, which: tuple[int, int], tokens: int | Sequence[int], **fields: Any
) -> None:
    """Tokens of an instance, or so many, made in one iteration if nothing else is said."""
    tokens = [7] * tokens if isinstance(tokens, int) else tokens
    defaults = {"start": 0, "version": 0, "instance": "rollout-0", "steps": 1, "drafted": 0}
    defaults["logprobs"] = [-0.5] * len(tokens)
    store.put_segment(TrajectoryId(*which), tokens=tokens, **defaults | fields)


def finished(
    store: Store,
    which: tuple[int, int],
    length: int,
    reward: float | None = None,
    reason: Any = "stop",
    text: str | None = None,
    **components: float,
) -> None:
    """That is the whole response, with its reward and text if they are given."""
    store.put_finished(TrajectoryId(*which), length=length, reason=reason)
    if reward is not None:
        components = components or {"f": reward}
        store.put_reward(TrajectoryId(*which), reward=reward, components=components)
    if text is not None:
        store.put_text(TrajectoryId(*which), text)


def put(
    store: Store,
    which: TrajectoryId,
    start: int,
    tokens: list[int],
    *,
    version: int = 0,
    epoch: int = 0,
) -> None:
    """A segment, and its group if that is not there yet."""
    group(store, which.group, row=0, epoch=epoch, prompt_tokens=prompt_of(which.group))
    segment(store, which, tokens, start=start, version=version)


def answered(
    store: Store,
    number: int,
    rewards: Sequence[float],
    *,
    version: int = 0,
    suite: str = "held_out",
    tokens: Sequence[int] = (1,),
    **fields: Any,
) -> None:
    """A suite's group, whose evaluation is over."""
    fields = {"row": 0, "epoch": EVALUATION_EPOCH, **fields}
    group(store, number, suite=suite, version=version, **fields)
    for member, reward in enumerate(rewards):
        which = TrajectoryId(number, member)
        segment(store, which, tokens, version=version, steps=len(tokens))
        finished(store, which, len(tokens), reward, text="t")
    store.put_ending(number, "evaluated", version=version)


def judge(store: Store, which: TrajectoryId, length: int, reward: float) -> None:
    """The response is complete and has its reward; other events stand in the log too."""
    finished(store, which, length, reward)
    store.record(0.0, [VersionPublished(1), TrajectoryRewarded(which, reward)])
