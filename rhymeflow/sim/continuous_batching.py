"""Continuous batching: which responses run, wait and are cached, and the next decode span.

Iterations in which the same trajectories decode, with the same choice of drafts, are one
`DecodeSpan`; an iteration that prefills is a span by itself. Between two spans the cached tokens
and those still to be prefilled never exceed `kv_capacity`."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import ceil

from rhymeflow.core.cost import CostModel
from rhymeflow.core.types import GroupId, TrajectoryId, Version
from rhymeflow.sim.drafts import ROUNDING, Choice, Drafts
from rhymeflow.sim.response import Response


@dataclass(frozen=True, slots=True)
class Hardware:
    """The costs, sizes and settings that all instances share."""

    cost: CostModel
    capacity: int  # trajectories that run at a time
    kv_capacity: int  # tokens in the cache
    watermark: int  # tokens of the cache that an admission leaves free
    max_prefill_tokens: int  # tokens that one iteration prefills
    max_length: int  # a response of this length ends for reason `length`, a shorter one for `stop`
    keep_cache: bool  # whether a pull keeps the KV cache
    drafts: Drafts
    warmup: tuple[int, CostModel] | None = None
    """The learner's first steps, if these train a critic alone: how many, and their costs."""


@dataclass(slots=True)
class Tally:
    """Seconds and counts of an instance's work."""

    decode: float = 0.0  # seconds of iterations without prefill
    prefill: float = 0.0  # seconds of iterations with prefill
    prefilled: float = 0.0  # the part of `prefill` that the prefilled tokens took
    pull: float = 0.0  # seconds
    pulls: int = 0
    preemptions: int = 0
    interrupts: int = 0  # responses that were interrupted
    lost: int = 0  # tokens that were not stored when it died
    tokens_generated: float = 0  # with drafts it has fractions, by mean acceptance
    prompt_tokens: int = 0  # tokens prefilled for responses that had not begun
    recomputed: int = 0  # tokens prefilled for responses that had
    decode_steps: int = 0  # sum over iterations of the trajectories decoded in each
    drafted: float = 0  # tokens
    accepted: float = 0  # drafted tokens that were accepted

    @property
    def busy(self) -> float:
        """Seconds in which the instance was busy."""
        return self.decode + self.prefill + self.pull


class DecodeSpan:
    """At most `iterations` iterations from `start` on; the first takes `first` seconds, and each
    further one `growth` seconds more than the one before.

    While the same n trajectories decode, every iteration adds n tokens to the cache, so j of them
    that begin with K tokens take `j (k1 K + max(k2, k3 n + c) + k4) + k1 n j (j - 1) / 2` seconds
    (`core/cost.py`, summed)."""

    __slots__ = ("end", "first", "growth", "iterations", "start")

    def __init__(self, start: float, first: float, growth: float, iterations: int) -> None:
        self.start, self.first, self.growth, self.iterations = start, first, growth, iterations
        self.end = self.after(iterations)

    def after(self, iterations: int) -> float:
        """Return the time at which `iterations` are over."""
        growth = self.growth * (iterations * (iterations - 1) / 2)
        return self.start + iterations * self.first + growth

    def over(self, now: float) -> int:
        """Return how many iterations are over at `now`."""
        return bisect_right(range(1, self.iterations + 1), now, key=self.after)

    def over_before(self, time: float) -> int:
        """Like `over`, extended to times before `start`: a negative number of iterations as long
        as the first one."""
        if time >= self.start:
            return self.over(time)
        return -ceil((self.start - time) / self.first)

    def cut(self, now: float) -> None:
        """End the span with the iteration that runs at `now`: commands take effect after it."""
        if now >= self.end:
            return
        j = self.over(now)
        self.iterations = j if self.after(j) >= now else j + 1
        self.end = self.after(self.iterations)


class Admitted:
    """A response that runs: it prefills or decodes."""

    __slots__ = ("decode_batch", "ends_at", "gone", "remaining", "response", "todo", "untouched")

    def __init__(self, response: Response, kept: int = 0) -> None:
        """`kept`: number of its first tokens that are in the cache."""
        self.response = response
        self.todo = response.prompt_tokens + response.generated - kept
        """Tokens to prefill before it decodes."""
        self.untouched = not kept  # none of its tokens is in the cache
        self.decode_batch: DecodeBatch | None = None  # None: it does not decode yet
        self.remaining: float = 0  # tokens when it began to decode
        self.ends_at: float = 0  # clock of the decode batch at its last token
        self.gone = False  # whether it no longer runs

    def update(self) -> float:
        """Bring `response.generated` up to date; return the tokens by the clock, which may have a
        fraction and exceed the length."""
        assert self.decode_batch is not None
        tokens = self.response.length - (self.ends_at - self.decode_batch.clock)
        self.response.generated = min(self.response.length, int(tokens + ROUNDING))
        return tokens


class DecodeBatch:
    """Responses that decode at one rate: a clock, and a heap of the clock times at which they end.

    The clock counts the tokens that each of them generates; with drafts, the mean per iteration. A
    response is complete after the iteration in which the clock reaches its end, and has exactly its
    length."""

    __slots__ = ("_inverse", "_numbers", "clock", "count", "ends", "gain")

    def __init__(self) -> None:
        self.clock: float = 0
        self.gain: float = 1  # tokens per trajectory and iteration
        self._inverse: float = 0  # sum of 1 / `remaining`
        self.count = 0  # trajectories in it
        self.ends: list[tuple[float, int, Admitted]] = []
        """Heap of (ends_at, number, admitted); it may still have responses that are gone."""
        self._numbers = count()  # ties go to the first to enter

    def enter(self, admitted: Admitted, remaining: float) -> None:
        """Add a response that ends after `remaining` tokens."""
        admitted.decode_batch, admitted.ends_at = self, self.clock + remaining
        admitted.remaining = max(remaining, 1.0)
        self.count += 1
        self._inverse += 1 / admitted.remaining
        heappush(self.ends, (admitted.ends_at, next(self._numbers), admitted))

    def leave(self, admitted: Admitted) -> None:
        """Remove a response, but from the heap."""
        self.count -= 1
        self._inverse = self._inverse - 1 / admitted.remaining if self.count else 0.0

    def past_ends(self, drafted: float) -> float:
        """Return the share of `drafted` tokens that would be past the ends of their responses, and
        so are not verified: in the mean half of a response's last draft."""
        if self._inverse <= 0:
            return 0.0
        remaining = self.count / self._inverse
        if remaining <= self.gain:  # the last draft is the only one
            return max(1 - remaining * self.count / drafted, 0.0)
        return self.gain / (2 * remaining)

    def iterations(self) -> int:
        """Return the iterations until the next response is complete; the batch is not empty."""
        while self.ends[0][2].gone:
            heappop(self.ends)
        return ceil((self.ends[0][0] - self.clock - ROUNDING) / self.gain)

    def complete(self) -> list[Admitted]:
        """Remove from the heap, and return, the responses that have reached their ends."""
        ends, reached, complete = self.ends, self.clock + ROUNDING, []
        while ends and ends[0][0] <= reached:
            admitted = heappop(ends)[2]
            if not admitted.gone:
                complete.append(admitted)
        return complete

    def clear(self) -> None:
        """Remove all responses."""
        self.ends.clear()
        self.count, self._inverse = 0, 0.0


class ContinuousBatch:
    """The responses on an instance, and its KV cache."""

    def __init__(self, hardware: Hardware, tally: Tally) -> None:
        self.hardware, self.tally = hardware, tally
        self.running: OrderedDict[TrajectoryId, Admitted] = OrderedDict()  # in order of admission
        self.waiting: OrderedDict[TrajectoryId, Response] = OrderedDict()  # in that order too
        self.chunks: list[tuple[Admitted, int]] = []
        """(response, tokens) to prefill in the current decode span, which then is one iteration."""
        self._prefilling: list[Admitted] = []  # running responses that do not decode yet
        self._joined: list[Admitted] = []  # those that decode without a prefill, from now on
        self._decode_batches = [DecodeBatch() for _ in hardware.drafts.acceptance]  # by class
        self._kept: OrderedDict[TrajectoryId, int] = OrderedDict()
        """Cached tokens of trajectories that wait for environments, longest waiting first."""
        self._kept_tokens = 0
        """Sum of `_kept`; not counted in `kv_tokens`, since these are evicted when needed."""
        self._clock: float = 0
        self._choice = hardware.drafts.none((0,) * len(self._decode_batches))
        """Drafts of the current decode span."""
        self._drafted: float = 0  # tokens drafted in each of its iterations
        self._cached: float = 0  # tokens in the cache
        self._owed = 0  # tokens that running responses still have to prefill; room is reserved

    def kv_tokens(self, iterations: int) -> int:
        """Return the tokens in the cache after `iterations` of the current decode span."""
        return round(self._cached + (0 if self.chunks else self._choice.generated * iterations))

    def clock(self, iterations: int) -> float:
        """Return the tokens that a trajectory decoded from the beginning on would have after
        `iterations` of the current decode span."""
        return float(self._clock + self._tokens_per_iteration * iterations)

    # -- between decode spans ----------------------------------------------------------------

    def submit(self, response: Response) -> None:
        """Queue a response."""
        is_here = response.id in self.running or response.id in self.waiting
        assert not is_here, f"{response.id} is here already"
        self.waiting[response.id] = response

    def stop(self, trajectories: Iterable[TrajectoryId]) -> list[Response]:
        """Remove these trajectories and return those that were here."""
        stopped = []
        for trajectory in trajectories:
            if trajectory in self.running:
                stopped.append(self._vacate(self.running.pop(trajectory)))
            elif trajectory in self.waiting:
                stopped.append(self.waiting.pop(trajectory))
        if stopped:
            self._prefilling = [admitted for admitted in self._prefilling if not admitted.gone]
        return stopped

    def _vacate(self, admitted: Admitted) -> Response:
        """Free the cache of a response that was removed from `running`."""
        response = admitted.response
        admitted.gone = True
        if admitted.todo:
            self._owed -= admitted.todo
            self._cached -= response.prompt_tokens + response.generated - admitted.todo
        else:
            # The newest token was sampled, but has not been through the model.
            self._cached -= response.prompt_tokens + self._end_decoding(admitted) - 1
        return response

    def _end_decoding(self, admitted: Admitted) -> float:
        """Remove a response from its decode batch, and from the tally what the clock counts beyond
        its tokens; return its tokens by the clock."""
        assert admitted.decode_batch is not None
        tokens = admitted.update()
        admitted.decode_batch.leave(admitted)
        self.tally.tokens_generated += admitted.response.generated - tokens
        self.tally.accepted += admitted.response.generated - tokens
        return tokens

    def store(self) -> None:
        """Store the tokens of all running responses."""
        for admitted in self.running.values():
            if not admitted.todo:
                admitted.update()
            admitted.response.store()

    def lose(self, iterations: int, unstored: int, version: Version) -> list[Response]:
        """Lose all tokens that are not stored; return the responses. `iterations` of the current
        decode span are over, under `version`; tokens of the last `unstored` are not stored."""
        self._pass(iterations, version)
        self._forget_kept(0)
        lost = [admitted.response for admitted in self.running.values()] + list(
            self.waiting.values()
        )
        stored = [response.generated for response in lost]
        for number, admitted in enumerate(self.running.values()):
            if not admitted.todo:
                assert admitted.decode_batch is not None
                tokens = self._end_decoding(admitted)
                length = int(tokens - admitted.decode_batch.gain * unstored + ROUNDING)
                stored[number] = min(admitted.response.generated, length)
        for response, length in zip(lost, stored, strict=True):
            self.tally.lost += response.generated - max(response.stored, length)
            response.lose(length)
        return lost

    def change_weights(self, version: Version) -> None:
        """Continue the running responses under `version`; keep or recompute their cache."""
        self._forget_kept(0)
        if self.hardware.keep_cache:
            for admitted in self.running.values():
                if not admitted.todo:
                    admitted.response.continue_under(version)
        else:
            self._recompute_all()

    def begin(self, now: float) -> DecodeSpan | None:
        """Admit waiting responses that fit, and return the next decode span; None: nothing runs."""
        if not self._make_room():
            self._admit()
        self._forget_kept(self._room)
        if self._prefilling:
            waiting = self._share_prompts()
            self._decode_ready()
            self._plan_chunks(waiting)
        return self._next_decode_span(now) if self.running else None

    def end(self, iterations: int, version: Version) -> list[Response]:
        """End the decode span after `iterations` under `version`; return completed responses."""
        if not iterations:  # cut before it began
            self.chunks = []
            return []
        self._pass(iterations, version)
        if self.chunks:
            self._prefill(version)
        ended = [
            self._vacate(self.running.pop(admitted.response.id))
            for decode_batch in self._decode_batches
            for admitted in decode_batch.complete()
        ]
        for response in ended:
            if not response.is_last_turn:
                # The newest token was sampled, but has not been through the model.
                tokens = response.prompt_tokens + response.generated - 1
                self._kept[response.id] = tokens
                self._kept_tokens += tokens
        return ended

    # -- inside ------------------------------------------------------------------------------

    @property
    def _room(self) -> float:
        """Tokens that the cache has room for beside one for each that decodes."""
        taken = self._cached + self._owed + self._num_decoding
        return self.hardware.kv_capacity - taken

    def _forget_kept(self, room: float) -> None:
        """Evict kept caches until they fit into `room` tokens."""
        while self._kept_tokens > max(room, 0):
            self._kept_tokens -= self._kept.popitem(last=False)[1]

    @property
    def _num_decoding(self) -> int:
        return len(self.running) - len(self._prefilling)

    @property
    def _tokens_per_iteration(self) -> float:
        """Mean tokens per trajectory and iteration of the current decode span."""
        return self._choice.generated / self._num_decoding if self._num_decoding else 1

    def _pass(self, iterations: int, version: Version) -> None:
        """Advance clocks, cache and tally by `iterations` under `version`."""
        # Not when they were planned: a decode span can be cut before it begins.
        for admitted in self._joined:
            if not admitted.gone:
                admitted.response.continue_under(version)
        self._joined = []
        growth, num_decoding = self._choice.generated, self._num_decoding
        self._clock += self._tokens_per_iteration * iterations
        self._cached += growth * iterations
        self.tally.tokens_generated += growth * iterations
        for decode_batch in self._decode_batches:
            if decode_batch.count:
                decode_batch.clock += decode_batch.gain * iterations
        self.tally.decode_steps += num_decoding * iterations
        self.tally.drafted += self._drafted * iterations
        self.tally.accepted += (growth - num_decoding) * iterations

    def _next_decode_span(self, now: float) -> DecodeSpan:
        cost = self.hardware.cost
        choice = self._choose()
        rows = self._num_decoding + self._drafted
        seconds = cost.iteration(rows, self._cached) + choice.searching
        growth = choice.generated
        if self.chunks:
            more = cost.prefill_token * sum(tokens for _, tokens in self.chunks)
            return DecodeSpan(now, seconds + more, 0.0, 1)
        left = self._room - sum(choice.drafted)  # beside what the next iteration puts in
        fit = 1 + int((left + ROUNDING) // growth)
        iterations = min(fit, *[b.iterations() for b in self._decode_batches if b.count])
        until = choice.until - ROUNDING
        if until < self._cached + growth * iterations:
            iterations = ceil((until - self._cached) / growth)
        return DecodeSpan(now, seconds, cost.k1 * growth, iterations)

    def _choose(self) -> Choice:
        """Choose the drafts of the next iteration, which have room in the cache until it is known
        which are accepted."""
        counts = tuple([each.count for each in self._decode_batches])
        room = int(self._room + ROUNDING)
        assert room >= 0, "the next iteration does not fit"
        choice = self.hardware.drafts.choose(counts, self._cached, room)
        for decode_batch, gain in zip(self._decode_batches, choice.gains, strict=True):
            decode_batch.gain = gain
        self._choice = choice
        each = zip(choice.drafted, self._decode_batches, strict=True)
        self._drafted = sum(size * (1 - batch.past_ends(size)) for size, batch in each if size)
        return choice

    def _recompute_all(self) -> None:
        """Drop the cache of all running responses, which prefill again."""
        self._cached = self._owed = 0
        for key, admitted in self.running.items():
            if not admitted.todo:
                self._end_decoding(admitted)
            admitted.gone = True
            self.running[key] = fresh = Admitted(admitted.response)
            self._owed += fresh.todo
        for decode_batch in self._decode_batches:
            decode_batch.clear()
        self._prefilling = list(self.running.values())

    def _make_room(self) -> bool:
        """Preempt until the next iteration fits; return whether anything was preempted."""
        preempted = False
        while self._room < -ROUNDING:
            assert len(self.running) > 1, "the cache does not hold one response"
            trajectory, admitted = self.running.popitem()
            if admitted.todo:
                self._prefilling.remove(admitted)
            self.waiting[trajectory] = self._vacate(admitted)
            self.waiting.move_to_end(trajectory, last=False)
            self.tally.preemptions += 1
            preempted = True
        return preempted

    def _admit(self) -> None:
        hardware = self.hardware
        while self.waiting and len(self.running) < hardware.capacity:
            trajectory, response = next(iter(self.waiting.items()))
            kept = self._kept.get(trajectory, 0)
            admitted = Admitted(response, kept)
            num_decoding = self._num_decoding
            margin = max(hardware.watermark, num_decoding) if self.running else 0
            taken = self._cached + self._owed + kept + admitted.todo
            if taken + margin > hardware.kv_capacity + ROUNDING:
                return
            del self.waiting[trajectory]
            self._kept_tokens -= self._kept.pop(trajectory, 0)
            self._cached += kept
            self.running[trajectory] = admitted
            self._prefilling.append(admitted)
            self._owed += admitted.todo

    def _decode_ready(self) -> None:
        """Let those decode that have nothing but their newest token to process: that is no prefill,
        and may have a draft. A turn without tokens, as an agent's first, is over with its prefill.
        """
        for admitted in self._prefilling:
            response = admitted.response
            if admitted.todo == 1 and response.generated < response.length:
                admitted.todo = 0
                self._owed -= 1
                self._joined.append(admitted)
                self._decode(admitted)
        self._prefilling = [admitted for admitted in self._prefilling if admitted.todo]

    def _decode(self, admitted: Admitted, sampled: int = 0) -> None:
        """Let it decode; `sampled` tokens come from the iteration that ends."""
        response = admitted.response
        remaining = response.length - response.generated - sampled
        self._decode_batches[response.draft_class].enter(admitted, remaining)

    def _plan_chunks(self, waiting: frozenset[Admitted]) -> None:
        """Choose what the next iteration prefills, without those that wait for a prompt."""
        budget = self.hardware.max_prefill_tokens
        self.chunks = []
        for admitted in self._prefilling:
            if not budget:
                break
            if admitted not in waiting:
                num_new = min(admitted.todo, budget)
                self.chunks.append((admitted, num_new))
                budget -= num_new

    def _share_prompts(self) -> frozenset[Admitted]:
        """Copy prompts that the cache has from group members; return responses that wait for one.
        The last token is not copied: the model must process it to sample the first response
        token."""
        groups = {admitted.response.id.group for admitted in self._prefilling}
        cached: set[GroupId] = set()
        for admitted in self.running.values():
            response = admitted.response
            if response.id.group in groups and admitted.todo <= response.generated + 1:
                cached.add(response.id.group)
        being_prefilled: set[GroupId] = set()
        waiting = set()
        # Responses that have begun come first, so that none waits for one that waits itself.
        for admitted in sorted(self._prefilling, key=lambda admitted: admitted.untouched):
            group = admitted.response.id.group
            if not admitted.untouched:
                being_prefilled.add(group)
            elif group in cached:
                num_copied = admitted.response.prompt_tokens - 1
                admitted.todo -= num_copied
                admitted.untouched = False
                self._owed -= num_copied
                self._cached += num_copied
            elif group in being_prefilled:
                waiting.add(admitted)
            else:
                being_prefilled.add(group)
        return frozenset(waiting)

    def _prefill(self, version: Version) -> None:
        """Add the current chunks to the cache; a response without further ones gets a token."""
        completed = False
        for admitted, num_new in self.chunks:
            response = admitted.response
            admitted.todo -= num_new
            admitted.untouched = False
            self._owed -= num_new
            self._cached += num_new
            self.tally.prefilled += self.hardware.cost.prefill_token * num_new
            if response.oldest_version is None:
                self.tally.prompt_tokens += num_new
            else:
                self.tally.recomputed += num_new
            if not admitted.todo:
                completed = True
                self.tally.tokens_generated += 1
                response.continue_under(version)
                self._decode(admitted, sampled=1)
        self.chunks = []
        if completed:
            self._prefilling = [admitted for admitted in self._prefilling if admitted.todo]
