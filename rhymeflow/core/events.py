"""Events reported to the coordinator. Each is stored before it is acted on.

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
    """All that arrived is reported: plan now. A runtime sends one after each round of events."""


@dataclass(frozen=True, slots=True)
class GroupCreated:
    """The data gave one more prompt: group `group` is row `prompt` in `epoch`.

    Groups are numbered without gaps, retries included, and taken in this order however they arrive.
    """

    group: GroupId
    prompt: int
    epoch: int
    prompt_tokens: int
    repeats: GroupId | None = None
    """The group whose prompt it was, if this answers a `RetryPrompt`."""


@dataclass(frozen=True, slots=True)
class InstanceJoined:
    """An instance is up and holds `version`. A name is used once."""

    instance: InstanceId
    version: Version
    capacity: int  # trajectories that it decodes at a time
    kv_capacity: int  # tokens that its KV cache holds
    checksum: str = ""
    """Of the weights that it holds, here and in `Pulled`; of the learner's, in `LearnerReady` and
    `VersionPublished`. 16 hexadecimal digits; empty in a simulation, which has no weights."""


@dataclass(frozen=True, slots=True)
class InstanceLeft:
    """The instance is gone, whatever it was commanded; tokens not stored by now are lost."""

    instance: InstanceId
    reason: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An instance after its commands up to `number` and the events that it reported before.

    The newer of two has the larger `number`, then the larger `decoded_tokens`; of equal ones the
    one that came last.
    """

    instance: InstanceId
    number: int
    waiting: tuple[TrajectoryId, ...]  # routed to it but not decoded: no room yet, or preempted
    kv_tokens: int  # in its KV cache
    decoded_tokens: float
    """Response tokens that one trajectory, decoded all the time since the instance joined, would
    have by now."""
    prefill_seconds: float = 0.0
    """Of each iteration since it joined, its seconds times the share of its tokens that were
    prefilled. The coordinator does not read it."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """The instance carried out its command `number`: it holds `version`, checksum proved."""

    instance: InstanceId
    number: int
    version: Version
    checksum: str = ""


@dataclass(frozen=True, slots=True)
class TrajectoryInterrupted:
    """Command `number` stopped it; `length` response tokens are stored, perhaps 0.

    `number` 0: no command did. Its instance is lost, which is reported next.
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
    """The policy's turn `turn`, from 1, is over and stored. `length`: of the response so far, with
    the environment's answers. The environment is asked; no instance has the trajectory.
    """

    trajectory: TrajectoryId
    instance: InstanceId
    turn: int
    length: int


@dataclass(frozen=True, slots=True)
class Observed:
    """The environment's answer to turn `turn` is stored, `length` tokens in all. The policy's next
    turn follows.
    """

    trajectory: TrajectoryId
    turn: int
    length: int
    seconds: float = 0.0
    """That the environment took. The coordinator does not read them, here or in `EpisodeEnded`."""
    calls: int = 0  # of tools, in this turn
    failed_calls: int = 0


@dataclass(frozen=True, slots=True)
class EpisodeEnded:
    """After turn `turn` the environment asks for nothing more: the response is complete."""

    trajectory: TrajectoryId
    turn: int
    reason: FinishReason
    seconds: float = 0.0
    calls: int = 0
    failed_calls: int = 0


@dataclass(frozen=True, slots=True)
class EnvironmentFailed:
    """The environment gave no answer to turn `turn`, after all retries."""

    trajectory: TrajectoryId
    turn: int
    error: str


@dataclass(frozen=True, slots=True)
class TrajectoryRewarded:
    """The weighted sum of the reward functions for a finished response."""

    trajectory: TrajectoryId
    reward: float
    components: dict[str, tuple[float, float]] | None = None
    """Weight and value of its parts by name, where advantages compare these one by one."""


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
    """The learner has carried out the first `parts` `Accumulate`s of batch `version`."""

    version: Version
    parts: int


@dataclass(frozen=True, slots=True)
class VersionPublished:
    """Training on batch `version - 1` is over and the weight store holds `version`."""

    version: Version
    checksum: str = ""
    skipped: tuple[int, ...] = ()
    """Optimizer steps that were skipped, by number from 0: their gradient was not finite."""
    reason: str = ""  # what was not finite


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A suite's prompts were answered and rewarded: `reward` is the mean over all answers that
    could be judged, None if there is none."""

    instance: InstanceId
    version: Version  # as in `Evaluate`
    reward: float | None
    suite: SuiteName = HELD_OUT
    held: Version | None = None
    """The version that answered: `version`, or a later one that the instance pulled instead. None
    in older logs."""


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
    | TrajectoryRewarded
    | RewardFailed
    | LearnerReady
    | Accumulated
    | VersionPublished
    | Evaluated
)
