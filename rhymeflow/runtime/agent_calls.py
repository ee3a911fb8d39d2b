"""The calls of an agent's response: those that the policy answers now, any number at once.

A call enters the response when it is answered, with the turn that answers it; `answered` is in that
order. Until then its tokens are here alone: an agent's programs end with this process.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, count, groupby

from msgspec.structs import astuple

from rhymeflow.core.types import InstanceId, Version
from rhymeflow.environments.episode import TurnFigures
from rhymeflow.store.branches import Asked, stretches
from rhymeflow.workers.messages import CallMade, EpisodeFailed, Part, TurnAnswered, TurnGrew


@dataclass(slots=True)
class RunningCall:
    """A call that is not answered yet, and what the policy has said so far."""

    made: CallMade
    branch: int
    """Its sequence's number: a sequence has one call at a time."""
    noise: int
    prompt: list[int]  # of its sequence
    asked: list[int]  # what follows the prompt, the call included
    parts: list[tuple[InstanceId, Part]] = field(default_factory=list)

    def take(self, instance: InstanceId, part: Part) -> None:
        """Take the next tokens of the turn."""
        assert part.start == len(self.said), (instance, part)
        self.parts.append((instance, part))

    @property
    def said(self) -> list[int]:
        """The policy's turn so far."""
        return list(chain.from_iterable(part.tokens for _, part in self.parts))

    def segments(self) -> Iterator[tuple[InstanceId, list[Part]]]:
        """Yield the parts of each instance and version, in order."""
        origins = groupby(self.parts, key=lambda each: (each[0], each[1].version))
        for (instance, _), parts in origins:
            yield instance, [part for _, part in parts]


@dataclass(slots=True)
class AgentCalls:
    """Those of one response, and where it is."""

    v_traj: Version
    instance: InstanceId | None = None
    """Where the running calls are answered; None: nowhere."""
    turn: int = 0
    """How often all calls were answered, the start of the program included."""
    is_waited_for: bool = False
    """Whether the response goes on once the program calls or ends."""
    ended: TurnAnswered | EpisodeFailed | None = None
    """How the program has ended, until the response does."""
    running: dict[int, RunningCall] = field(default_factory=dict)
    """By branch."""
    answered: list[Asked] = field(default_factory=list)
    num_observed: int = 0
    """How many tokens of calls the coordinator knows of."""
    figures: TurnFigures = field(default_factory=TurnFigures)
    """Of the calls that it does not know of."""
    _noises: set[int] = field(default_factory=set)
    _branches: dict[int, int] = field(default_factory=dict)
    """By where its last turn ends in the response, each branch without a call."""
    _num_branches: int = 0

    def add(self, figures: TurnFigures) -> None:
        """Count what a program did before a call."""
        sums = zip(astuple(self.figures), astuple(figures), strict=True)
        self.figures = TurnFigures(*map(sum, sums))

    def begin(self, member: int, row: list[int], made: CallMade) -> RunningCall:
        """Add a call; `row` is the response so far."""
        parts = stretches(self.answered, made.follows)
        before = [token for start, end in parts for token in row[start:end]]
        length = len(made.tokens)
        if parts:
            length = next(each.end for each in self.answered if each.start == parts[0][0])
            length -= parts[0][0]
        whole = [*before, *made.tokens]
        branch = self._branches.pop(made.follows, None)
        if branch is None:
            branch, self._num_branches = self._num_branches, self._num_branches + 1
        noises = (noise_of(member, whole, times) for times in count())
        noise = next(each for each in noises if each not in self._noises)
        self._noises.add(noise)
        call = RunningCall(made, branch, noise, whole[:length], whole[length:])
        self.running[branch] = call
        return call

    def take(self, key: str, instance: InstanceId, part: Part) -> TurnGrew | None:
        """Take the next tokens of a turn; those of a call that is over are dropped. Return what
        tells them to a program that reads them at once; `key` names the response."""
        if (call := self.running.get(part.branch)) is None:
            return None
        call.take(instance, part)
        about = key, call.made.number, part.tokens, part.logprobs
        return TurnGrew(*about) if call.made.is_streamed else None

    def end(self, branch: int, start: int, end: int, *, is_free: bool = True) -> None:
        """Note that a call was answered: it and its turn are the response from `start` to `end`. If
        the branch is free, the next call that follows can have it."""
        made = self.running.pop(branch).made
        self.answered.append(Asked(start, start + len(made.tokens), made.follows))
        if is_free:
            self._branches[end] = branch

    def find(self, number: int) -> RunningCall | None:
        """Return the running call of this number."""
        return next((each for each in self.running.values() if each.made.number == number), None)

    def drop(self, call: RunningCall) -> None:
        """Forget a call that nobody waits for. Who asks the same again gets the same noise."""
        self._noises.discard(call.noise)
        del self.running[call.branch]


def noise_of(member: int, asked: list[int], times: int) -> int:
    """Return what tells the noise of a turn from that of others: it does not depend on the order in
    which calls arrive (law 3), but on how many others asked the same."""
    key = b"%d %d %s" % (member, times, array("i", asked).tobytes())
    return int.from_bytes(blake2b(key, digest_size=7).digest())
