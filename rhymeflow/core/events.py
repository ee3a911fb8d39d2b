"""Events reported to the coordinator. Each is stored before the coordinator handles it.

An event says what has happened, never what to do. It can arrive late, twice or out of order. It
carries no tokens, log-probabilities or weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from rhymeflow.core.types import (
    HELD_OUT,
    FinishReason,
    GroupId,
    InstanceId,
    SuiteName,
    TrajectoryId,
    Version,
)


@dataclass(frozen=True, slots=True)
class Tick:
    """Plan now. A runtime sends one after each round of events."""


@dataclass(frozen=True, slots=True)
class GroupCreated:
    """A prompt was read from the data: group `group` is row `prompt` in `epoch`.

    Groups are numbered without gaps, retries included; the coordinator takes them in this order.
    """

    group: GroupId
    prompt: int
    epoch: int
    prompt_tokens: int
    repeats: GroupId | None = None
    """The ended group whose prompt this is, if a `RetryPrompt` asked for it."""


@dataclass(frozen=True, slots=True)
class InstanceJoined:
    """An instance is up and holds `version`. A name is used once."""

    instance: InstanceId
    version: Version
    capacity: int  # trajectories that it decodes at a time
    kv_capacity: int  # tokens that its KV cache holds
    checksum: str = ""
    """Checksum of the instance's weights, here and in `Pulled`; of the learner's weights in
    `LearnerReady` and `VersionPublished`. 16 hexadecimal digits; empty in a simulation."""


@dataclass(frozen=True, slots=True)
class InstanceLeft:
    """The instance is gone, its commands with it; tokens not stored by now are lost."""

    instance: InstanceId
    reason: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of an instance after its commands up to `number` and its earlier events.

    The newer of two snapshots has the larger `number`, then the larger `decoded_tokens`; if these
    are equal, it is the one that arrived last.
    """

    instance: InstanceId
    number: int
    waiting: tuple[TrajectoryId, ...]  # routed to it but not decoded: no room yet, or preempted
    kv_tokens: int  # in its KV cache
    decoded_tokens: float
    """Response tokens that a trajectory would have by now, had it been decoded in every iteration
    since the instance joined."""
    prefill_seconds: float = 0.0
    """Seconds of prefill since it joined: each iteration's seconds times the share of its tokens
    that were prefilled. The coordinator does not read it."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """The instance carried out `Pull` `number`: it holds `version`, its checksum verified."""

    instance: InstanceId
    number: int
    version: Version
    checksum: str = ""


@dataclass(frozen=True, slots=True)
class TrajectoryInterrupted:
    """Command `number` stopped the trajectory; `length` response tokens, perhaps 0, are stored.

    `number` 0: its instance was lost; `InstanceLeft` follows.
    """

    trajectory: TrajectoryId
    instance: InstanceId
    number: int
    length: int


@dataclass(frozen=True, slots=True)
class TrajectoryFinished:
    """The response is complete and stored, `length` tokens long."""

    trajectory: TrajectoryId
    instance: InstanceId
    length: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """The policy's turn `turn`, from 1, is over and stored; its environment is called next.

    `length`: tokens of the response so far, the environment's observations included.
    """

    trajectory: TrajectoryId
    instance: InstanceId
    turn: int
    length: int
    observed: int = 0
    """Tokens of an agent's calls among these that no event has told of yet."""


@dataclass(frozen=True, slots=True)
class Observed:
    """The observation that follows turn `turn` is stored; the response now has `length` tokens."""

    trajectory: TrajectoryId
    turn: int
    length: int
    seconds: float = 0.0
    """Seconds that the environment took; the coordinator ignores it, here and in `EpisodeEnded`."""
    calls: int = 0  # of tools, in this turn
    failed_calls: int = 0


@dataclass(frozen=True, slots=True)
class EpisodeEnded:
    """The environment ended the episode after turn `turn`: the response is complete."""

    trajectory: TrajectoryId
    turn: int
    reason: FinishReason
    seconds: float = 0.0
    calls: int = 0
    failed_calls: int = 0


@dataclass(frozen=True, slots=True)
class EnvironmentFailed:
    """The environment failed to answer turn `turn`, after all retries."""

    trajectory: TrajectoryId
    turn: int
    error: str


@dataclass(frozen=True, slots=True)
class ProgramLost:
    """The agent's program of a trajectory is gone through no fault of its own, so that it cannot go
    on: its group begins again."""

    trajectory: TrajectoryId
    reason: str


@dataclass(frozen=True, slots=True)
class TrajectoryRewarded:
    """The weighted sum of the reward functions for a finished response."""

    trajectory: TrajectoryId
    reward: float
    components: dict[str, tuple[float, float]] | None = None
    """(weight, value) by reward function, if each reward is normalized by itself (GDPO)."""


@dataclass(frozen=True, slots=True)
class RewardFailed:
    """No reward could be computed for a finished response, after all retries."""

    trajectory: TrajectoryId
    error: str


@dataclass(frozen=True, slots=True)
class LearnerReady:
    """The learner is up and the weight store holds `version`."""

    version: Version
    checksum: str = ""


@dataclass(frozen=True, slots=True)
class Accumulated:
    """The learner has carried out the first `parts` `Accumulate`s of batch `version`; with 0 parts,
    it can begin with them, while `version` is being published."""

    version: Version
    parts: int


@dataclass(frozen=True, slots=True)
class VersionPublished:
    """Training on batch `version - 1` is over and the weight store holds `version`."""

    version: Version
    checksum: str = ""
    skipped: tuple[int, ...] = ()
    """Numbers, from 0, of the optimizer steps skipped because their gradient was not finite."""
    reason: str = ""  # what was not finite


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A suite was evaluated: `reward` is the mean over all responses whose reward could be
    computed, None if there are none."""

    instance: InstanceId
    version: Version  # as in `Evaluate`
    reward: float | None
    suite: SuiteName = HELD_OUT
    held: Version | None = None
    """The version evaluated: `version`, or a newer one pulled instead; None in older logs."""


Event = (
    Tick
    | GroupCreated
    | InstanceJoined
    | InstanceLeft
    | Snapshot
    | Pulled
    | TrajectoryInterrupted
    | TrajectoryFinished
    | TurnEnded
    | Observed
    | EpisodeEnded
    | EnvironmentFailed
    | ProgramLost
    | TrajectoryRewarded
    | RewardFailed
    | LearnerReady
    | Accumulated
    | VersionPublished
    | Evaluated
)
