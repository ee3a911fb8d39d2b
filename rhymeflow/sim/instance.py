"""A simulated rollout instance: continuous batching, advanced from event to event.

It runs what the engine runs, iteration by iteration in effect, but never one by one:

- an iteration with n decoding trajectories and K tokens in the cache lasts as the cost model says;
  each decoding trajectory gets one token;
- one that is admitted first takes in its prompt and what there is of its response, in chunks of at
  most `max_prefill_tokens` an iteration, each token adding `prefill_token` seconds; the iteration
  that completes this makes its next token. Such iterations are events of their own;
- between them n is constant, and all iterations up to the next end are one `Stretch`;
- with `share_prompts`, of running members of a group one computes the prompt and the others copy
  it once it is there, for nothing (as the engine does); each holds it in the cache for itself;
- in order of arrival what waits is admitted, up to `capacity`, while the cache has room for its
  tokens and `watermark` beyond. When the next iteration would not fit, the newest gives up its
  place, its cache is lost, and it waits at the head;
- commands are carried out between iterations, in order. A pull takes `cost.pull` seconds in which
  nothing else happens; what runs then goes on with its cache (`keep_cache`) or takes it all in
  again.

Holds true: the cache never holds more than `kv_capacity`; every token of a response was made under
the version the instance held. Knows nothing of groups' rules, batches, rewards or the mind.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from rhymeflow.core.commands import Abort, InstanceCommand, Interrupt, Pull, Route
from rhymeflow.core.cost import CostModel
from rhymeflow.core.events import (
    Event,
    Pulled,
    Snapshot,
    TrajectoryFinished,
    TrajectoryInterrupted,
)
from rhymeflow.core.types import GroupId, InstanceId, TrajectoryId, Version
from rhymeflow.sim.response import Response
from rhymeflow.sim.stretch import Stretch
from rhymeflow.sim.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Hardware:
    """What all instances of a cluster have in common."""

    cost: CostModel
    capacity: int
    """Trajectories that run at a time."""
    kv_capacity: int
    """Tokens in the cache."""
    watermark: int
    """Tokens of the cache that an admission leaves free."""
    max_prefill_tokens: int
    """Tokens that one iteration takes in."""
    max_length: int
    """A response of this length ends for reason `length`, a shorter one for `stop`."""
    share_prompts: bool
    keep_cache: bool


@dataclass(slots=True)
class Tally:
    """What an instance did, in seconds and counts."""

    decode: float = 0.0
    prefill: float = 0.0
    """Seconds of iterations that took something in."""
    pull: float = 0.0
    pulls: int = 0
    preemptions: int = 0
    interrupts: int = 0
    """Responses that were stopped to be continued, here or elsewhere, or to be concluded."""
    tokens_made: int = 0
    prompt_tokens: int = 0
    """Tokens taken in for responses that had not begun."""
    taken_in_again: int = 0
    """Tokens taken in for responses that had."""

    @property
    def busy(self) -> float:
        """Seconds in which it did anything."""
        return self.decode + self.prefill + self.pull


class Place:
    """A response among those that run."""

    __slots__ = ("ends_at", "gone", "response", "todo", "untouched")

    def __init__(self, response: Response) -> None:
        self.response = response
        self.todo = response.prompt_tokens + response.made
        """Tokens to take in before it decodes."""
        self.untouched = True
        """Nothing of it is in the cache."""
        self.ends_at = 0
        """Once it decodes: the number of the iteration that makes its last token."""
        self.gone = False


class Instance:
    """One instance, at `now` up and idle.

    Whoever drives it calls `advance` at the time `next` says, and hands it commands by `deliver`,
    after which `next` may have changed.

    Args:
        name: of the instance.
        index: its row in the timeline.
        hardware: what it can do, and how fast.
        version: of the weights it holds.
        now: virtual seconds.
        find: the response to a trajectory that is routed here.
        published: asked when a pull begins: the newest version, which is the one that is taken.
        timeline: where what it does is written; None: nowhere.
    """

    def __init__(
        self,
        name: InstanceId,
        index: int,
        hardware: Hardware,
        *,
        version: Version,
        now: float,
        find: Callable[[TrajectoryId], Response],
        published: Callable[[], Version],
        timeline: Timeline | None = None,
    ) -> None:
        self.name, self.index, self.hardware, self.version = name, index, hardware, version
        self.next = inf
        """The time at which it must be advanced."""
        self.last_number = 0
        self.tally = Tally()
        self.running: OrderedDict[TrajectoryId, Place] = OrderedDict()
        """In order of admission."""
        self.waiting: OrderedDict[TrajectoryId, Response] = OrderedDict()
        """In the order in which they are to be admitted."""
        self._find, self._published, self._timeline = find, published, timeline
        self._inbox: deque[InstanceCommand] = deque()
        self._stretch: Stretch | None = None
        self._pulling: tuple[Pull, Version] | None = None
        self._chunks: list[tuple[Place, int]] = []
        """What the iteration under way takes in."""
        self._taking_in: list[Place] = []
        """Those of the running that do not decode yet."""
        self._ends: list[tuple[int, int, Place]] = []
        """Heap of (ends_at, serial, place) of those that decode, and of some that are gone."""
        self._serial = 0
        self._iterations = 0
        self._cached = 0
        """Tokens in the cache."""
        self._owed = 0
        """Tokens still to be taken in by those that run; their room is taken already."""
        self._since = now

    @property
    def pulling(self) -> bool:
        """Whether it takes new weights, and does nothing else."""
        return self._pulling is not None

    @property
    def busy(self) -> bool:
        """Whether it does, or has been told to do, anything."""
        return self.next < inf

    def kv_tokens(self, now: float) -> int:
        """Tokens in its cache."""
        if self._stretch is None or self._chunks:
            return self._cached
        return self._cached + (len(self.running) - len(self._taking_in)) * self._stretch.over(now)

    def snapshot(self, now: float) -> Snapshot:
        """How it is."""
        return Snapshot(self.name, self.last_number, tuple(self.waiting), self.kv_tokens(now))

    def deliver(self, command: InstanceCommand, now: float) -> None:
        """Take a command, to be carried out after those before it, between two iterations."""
        assert command.instance == self.name
        self._inbox.append(command)
        if self._stretch is not None:
            self._stretch.cut(now)
            if self._stretch.end != self.next:
                self.next = self._stretch.end
        elif self._pulling is None and self.next != now:
            self.next = now

    def advance(self, now: float) -> list[Event]:
        """Do what is due at `now` == `next`; return the facts, in order."""
        assert now == self.next, (now, self.next)
        facts: list[Event] = []
        told = bool(self._inbox)
        waited = bool(self.waiting)
        if self._pulling is not None:
            facts.append(self._end_pull(now))
        elif self._stretch is not None:
            self._end_stretch(now, facts)
        if told:
            self._obey(now, facts)
        if self._pulling is None:
            self._begin(now)
        if self._pulling is None and (told or waited or self.waiting):
            facts.append(self.snapshot(now))
        return facts

    def busy_seconds(self, now: float) -> float:
        """Seconds in which it did anything, what it is about at `now` included."""
        under_way = self._stretch is not None or self._pulling is not None
        return self.tally.busy + (now - self._since if under_way else 0.0)

    def crash(self, now: float) -> list[Response]:
        """Be gone; return what was here, as far as it was stored."""
        if self._stretch is not None or self._pulling is not None:
            self.tally.decode += now - self._since
        self._stretch = self._pulling = None
        if self._timeline is not None:
            self._timeline.leave(self.index, now)
        lost = [place.response for place in self.running.values()] + list(self.waiting.values())
        for response in lost:
            response.lose()
        self.next = inf
        return lost

    # -- commands ----------------------------------------------------------------------------

    def _obey(self, now: float, facts: list[Event]) -> None:
        while self._inbox and self._pulling is None:
            command = self._inbox.popleft()
            assert command.number > self.last_number, f"{command} after {self.last_number}"
            self.last_number = command.number
            match command:
                case Route(trajectory=trajectory):
                    assert trajectory not in self.running, f"{trajectory} is here already"
                    assert trajectory not in self.waiting, f"{trajectory} is here already"
                    self.waiting[trajectory] = self._find(trajectory)
                case Interrupt(number=number, trajectories=trajectories):
                    for response in self._stop(trajectories):
                        response.store()
                        self.tally.interrupts += 1
                        facts.append(
                            TrajectoryInterrupted(response.id, self.name, number, response.made)
                        )
                case Abort(trajectories=trajectories):
                    self._stop(trajectories)
                case Pull():
                    self._begin_pull(command, now)
                case _:
                    raise AssertionError(f"{command}: the simulator does not evaluate")

    def _stop(self, trajectories: tuple[TrajectoryId, ...]) -> list[Response]:
        """Take these out, those that are here."""
        stopped = []
        for trajectory in trajectories:
            if trajectory in self.running:
                stopped.append(self._vacate(self.running.pop(trajectory)))
            elif trajectory in self.waiting:
                stopped.append(self.waiting.pop(trajectory))
        if stopped:
            self._taking_in = [place for place in self._taking_in if not place.gone]
        return stopped

    def _vacate(self, place: Place) -> Response:
        """Free the cache of one that is no longer among those that run."""
        response = place.response
        place.gone = True
        if place.todo:
            self._owed -= place.todo
            self._cached -= response.prompt_tokens + response.made - place.todo
        else:
            response.made = response.length - (place.ends_at - self._iterations)
            # The newest token was sampled, but has not been through the model.
            self._cached -= response.prompt_tokens + response.made - 1
        return response

    def _begin_pull(self, command: Pull, now: float) -> None:
        for place in self.running.values():
            if not place.todo:
                place.response.made = place.response.length - (place.ends_at - self._iterations)
            place.response.store()
        self._pulling = command, self._published()
        self._since = now
        self.next = now + self.hardware.cost.pull

    def _end_pull(self, now: float) -> Pulled:
        assert self._pulling is not None
        command, version = self._pulling
        assert version >= command.version, f"{command}, but only {version} is published"
        self._pulling = None
        self.tally.pull += now - self._since
        self.tally.pulls += 1
        if self._timeline is not None:
            self._timeline.span(self.index, "pull", self._since, now, version)
        self.version = version
        if self.hardware.keep_cache:
            for place in self.running.values():
                if not place.todo:
                    place.response.goes_on_under(version)
        else:
            self._take_in_all()
        return Pulled(self.name, command.number, version)

    def _take_in_all(self) -> None:
        """Nothing cached is valid any more."""
        self._ends.clear()
        self._cached = self._owed = 0
        for key, place in self.running.items():
            place.gone = True
            self.running[key] = fresh = Place(place.response)
            self._owed += fresh.todo
        self._taking_in = list(self.running.values())

    # -- iterations --------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        """Admit what there is room for and start iterating."""
        if not self._make_room():
            self._admit()
        if self._timeline is not None:
            self._timeline.load(self.index, now, len(self.running), self._cached)
        if not self.running:
            self._stretch = None
            self.next = inf
            return
        num_decoding = len(self.running) - len(self._taking_in)
        cost = self.hardware.cost
        if self._taking_in:
            tokens = self._plan_chunks()
            seconds = cost.iteration(num_decoding, self._cached) + cost.prefill_token * tokens
            self._stretch = Stretch(now, seconds, 0.0, 1)
        else:
            room = (self.hardware.kv_capacity - self._cached) // num_decoding
            iterations = min(self._next_end() - self._iterations, room)
            seconds = cost.iteration(num_decoding, self._cached)
            self._stretch = Stretch(now, seconds, cost.k1 * num_decoding, iterations)
        self._since = now
        self.next = self._stretch.end

    def _make_room(self) -> bool:
        """Preempt until the next iteration fits; return whether anything was preempted."""
        capacity = self.hardware.kv_capacity
        preempted = False
        while self._cached + self._owed + len(self.running) - len(self._taking_in) > capacity:
            assert len(self.running) > 1, "the cache does not hold one response"
            trajectory, place = self.running.popitem()
            if place.todo:
                self._taking_in.remove(place)
            self.waiting[trajectory] = self._vacate(place)
            self.waiting.move_to_end(trajectory, last=False)
            self.tally.preemptions += 1
            preempted = True
        return preempted

    def _admit(self) -> None:
        hardware = self.hardware
        while self.waiting and len(self.running) < hardware.capacity:
            trajectory, response = next(iter(self.waiting.items()))
            place = Place(response)
            num_decoding = len(self.running) - len(self._taking_in)
            margin = max(hardware.watermark, num_decoding) if self.running else 0
            if self._cached + self._owed + place.todo + margin > hardware.kv_capacity:
                return
            del self.waiting[trajectory]
            self.running[trajectory] = place
            self._taking_in.append(place)
            self._owed += place.todo

    def _plan_chunks(self) -> int:
        """Say what the next iteration takes in; return how many tokens."""
        budget = self.hardware.max_prefill_tokens
        held = self._share() if self.hardware.share_prompts else frozenset()
        self._chunks = []
        for place in self._taking_in:
            if not budget:
                break
            if place not in held:
                num_new = min(place.todo, budget)
                self._chunks.append((place, num_new))
                budget -= num_new
        return self.hardware.max_prefill_tokens - budget

    def _share(self) -> frozenset[Place]:
        """Copy prompts that are there; return those that wait for one in the making.

        All but the last token of the prompt is copied, which the model must see for the first token
        of the response.
        """
        groups = {place.response.id.group for place in self._taking_in}
        there: set[GroupId] = set()
        for place in self.running.values():
            response = place.response
            if response.id.group in groups and place.todo <= response.made + 1:
                there.add(response.id.group)
        makers: set[GroupId] = set()
        held = set()
        # Those that have begun come first, so that nobody waits for one that waits itself.
        for place in sorted(self._taking_in, key=lambda place: place.untouched):
            group = place.response.id.group
            if not place.untouched:
                makers.add(group)
            elif group in there:
                length = place.response.prompt_tokens - 1
                place.todo -= length
                place.untouched = False
                self._owed -= length
                self._cached += length
            elif group in makers:
                held.add(place)
            else:
                makers.add(group)
        return frozenset(held)

    def _end_stretch(self, now: float, facts: list[Event]) -> None:
        stretch, tally = self._stretch, self.tally
        assert stretch is not None
        self._stretch = None
        if not stretch.iterations:  # cut before it began
            self._chunks = []
            return
        num_decoding = len(self.running) - len(self._taking_in)
        self._iterations += stretch.iterations
        self._cached += num_decoding * stretch.iterations
        tally.tokens_made += num_decoding * stretch.iterations
        kind = "prefill" if self._chunks else "decode"
        if self._chunks:
            tally.prefill += now - self._since
            self._take_in()
        else:
            tally.decode += now - self._since
        if self._timeline is not None:
            self._timeline.span(self.index, kind, self._since, now, self.version)
        ends = self._ends
        while ends and ends[0][0] <= self._iterations:
            place = heappop(ends)[2]
            if not place.gone:
                facts.append(self._finish(place))

    def _take_in(self) -> None:
        """The chunks under way are in the cache; who has all of them gets a token."""
        completed = False
        for place, num_new in self._chunks:
            response = place.response
            place.todo -= num_new
            place.untouched = False
            self._owed -= num_new
            self._cached += num_new
            if response.oldest_version is None:
                self.tally.prompt_tokens += num_new
            else:
                self.tally.taken_in_again += num_new
            if not place.todo:
                completed = True
                self.tally.tokens_made += 1
                response.goes_on_under(self.version)
                place.ends_at = self._iterations - 1 + response.length - response.made
                self._serial += 1
                heappush(self._ends, (place.ends_at, self._serial, place))
        self._chunks = []
        if completed:
            self._taking_in = [place for place in self._taking_in if place.todo]

    def _finish(self, place: Place) -> TrajectoryFinished:
        response = self._vacate(self.running.pop(place.response.id))
        response.store()
        reason = "length" if response.length >= self.hardware.max_length else "stop"
        return TrajectoryFinished(response.id, self.name, response.length, reason)

    def _next_end(self) -> int:
        while self._ends[0][2].gone:
            heappop(self._ends)
        return self._ends[0][0]
