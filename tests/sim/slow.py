"""The oracle for `sim/batch.py` and `sim/instance.py`: one iteration after another.

Written from the words at the heads of those files, with nothing of their bookkeeping: every
sequence has its own count of cached tokens and of those it has made, and every sum is summed.
Drafts are chosen anew for every iteration, by what is tested on its own (`test_drafts.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rhymeflow.core.commands import Abort, InstanceCommand, Interrupt, Pull, Route
from rhymeflow.core.events import Event, Pulled, TrajectoryFinished, TrajectoryInterrupted
from rhymeflow.core.types import TrajectoryId
from rhymeflow.sim.continuous_batching import Hardware


@dataclass(eq=False)
class Sequence:
    id: TrajectoryId
    prompt: int
    length: int
    known: bool = False
    flow: float = 0.0
    """Made so far, fractions included."""
    cached: float = 0
    oldest: int | None = None

    @property
    def generated(self) -> int:
        return min(self.length, int(self.flow + 1e-6))

    @property
    def remaining(self) -> float:
        """Tokens of it that are not in the cache; 1: it decodes."""
        return self.prompt + self.generated - self.cached

    entering: bool = True
    """Since it was admitted, or since a pull, it has generated no token."""


@dataclass
class SlowInstance:
    """Runs a list of (time, command), given beforehand; `reported` has (time, event)."""

    hardware: Hardware
    name: str
    commands: list[tuple[float, InstanceCommand]]
    sequences: dict[TrajectoryId, Sequence]
    published: list[tuple[float, int]]
    version: int = 0
    now: float = 0.0
    running: list[Sequence] = field(default_factory=list)
    waiting: list[Sequence] = field(default_factory=list)
    reported: list[tuple[float, Event]] = field(default_factory=list)
    preemptions: int = 0
    clock: float = 0.0

    def run(self) -> SlowInstance:
        while self.commands or self.running or self.waiting:
            if not self.running and not self.waiting:
                self.now = max(self.now, self.commands[0][0])
            while self.commands and self.commands[0][0] <= self.now:
                self.obey(self.commands.pop(0)[1])
            self.iterate()
        return self

    def obey(self, command: InstanceCommand) -> None:
        here = self.running + self.waiting
        match command:
            case Route():
                self.waiting.append(self.sequences[command.trajectory])
            case Interrupt() | Abort():
                for trajectory in command.trajectories:
                    for sequence in [s for s in here if s.id == trajectory]:
                        self.leave(sequence)
                        if isinstance(command, Interrupt):
                            self.report(
                                TrajectoryInterrupted(
                                    trajectory, self.name, command.number, sequence.generated
                                )
                            )
            case Pull():
                self.version = max(v for at, v in self.published if at <= self.now)
                self.now += self.hardware.cost.pull
                for sequence in self.running:
                    if self.hardware.keep_cache:
                        if not sequence.entering:
                            sequence.oldest = min(sequence.oldest, self.version)
                    else:
                        self.forget(sequence)
                self.report(Pulled(self.name, command.number, self.version))

    def leave(self, sequence: Sequence) -> None:
        for where in (self.running, self.waiting):
            if sequence in where:
                where.remove(sequence)
        self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Nothing of it is in the cache, nor is a fraction of a token."""
        sequence.cached, sequence.entering, sequence.flow = 0, True, sequence.generated

    def gains(self, decoding: list[Sequence]) -> tuple[int, list[float]]:
        """Rows of the iteration, and what each makes."""
        drafts, classes = self.hardware.drafts, [int(s.known) for s in decoding]
        counts = classes.count(0), classes.count(1)
        if drafts is None or not decoding:
            return len(decoding), [1.0] * len(decoding)
        choice = drafts.choose(counts, sum(s.cached for s in self.running))
        generated = [choice.gains[index] for index in classes]
        if self.taken() + sum(generated) > self.hardware.kv_capacity + 1e-6:
            return len(decoding), [1.0] * len(decoding)
        return choice.rows, generated

    def taken(self) -> int:
        """Room that is taken, or promised to those that are being prefilled."""
        return sum(s.prompt + s.generated if s.entering else s.cached for s in self.running)

    def iterate(self) -> None:
        hardware = self.hardware
        preempted = False
        while (
            self.taken() + sum(not s.entering for s in self.running) > hardware.kv_capacity + 1e-6
        ):
            newest = self.running[-1]
            self.leave(newest)
            self.waiting.insert(0, newest)
            self.preemptions += 1
            preempted = True
        while not preempted and self.waiting and len(self.running) < hardware.capacity:
            head = self.waiting[0]
            margin = max(hardware.watermark, sum(not s.entering for s in self.running))
            if self.running and (
                self.taken() + head.prompt + head.generated + margin > hardware.kv_capacity + 1e-6
            ):
                break
            self.running.append(self.waiting.pop(0))
        if not self.running:
            return
        held = self.share()
        budget = hardware.max_prefill_tokens
        work = []
        decoding = [s for s in self.running if not s.entering]
        for sequence in self.running:
            if sequence.entering and sequence not in held:
                num_new = min(sequence.remaining, budget)
                budget -= num_new
                work.append((sequence, num_new))
        cached = sum(s.cached for s in self.running)
        rows, gains = self.gains(decoding)
        self.clock += sum(gains) / len(gains) if gains else 1
        self.now += hardware.cost.iteration(rows, cached)
        self.now += hardware.cost.prefill_token * (hardware.max_prefill_tokens - budget)
        for sequence, num_new in work:
            sequence.cached += num_new
        for sequence, gain in zip(decoding, gains, strict=True):
            sequence.cached += gain
            sequence.flow += gain
        first = [s for s, _ in work if s.remaining == 0]
        for sequence in first:
            sequence.flow += 1
        for sequence in decoding + first:
            sequence.entering = False
            old = self.version if sequence.oldest is None else sequence.oldest
            sequence.oldest = min(old, self.version)
        for sequence in [s for s in self.running if s.generated == s.length and not s.entering]:
            self.running.remove(sequence)
            reason = "length" if sequence.length >= hardware.max_length else "stop"
            self.report(TrajectoryFinished(sequence.id, self.name, sequence.length, reason))

    def share(self) -> list[Sequence]:
        there = {s.id.group for s in self.running if s.cached >= s.prompt - 1}
        entering = [s for s in self.running if s.entering]
        makers = {s.id.group for s in entering if s.cached > 0}
        held = []
        for sequence in entering:
            if sequence.cached > 0:
                continue
            if sequence.id.group in there:
                sequence.cached = sequence.prompt - 1
            elif sequence.id.group in makers:
                held.append(sequence)
            else:
                makers.add(sequence.id.group)
        return held

    def report(self, event: Event) -> None:
        self.reported.append((self.now, event))
