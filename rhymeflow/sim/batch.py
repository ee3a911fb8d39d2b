"""Continuous batching: who runs, who waits, what is in the cache, and what the next stretch is.

- An iteration with n decoding trajectories and K tokens in the cache lasts as the cost model says;
  each decoding trajectory gets one token, or with drafts as many as `drafts.py` says. Those that
  get equally many are in one lane (`lane.py`). Where the cache has no room for as many, nothing is
  drafted.
- One that is admitted first takes in its prompt and what there is of its response, in chunks of at
  most `max_prefill_tokens` an iteration, each token adding `prefill_token` seconds; the iteration
  that completes this makes its next token. Such iterations are stretches of their own.
- Between them n is constant, and all iterations up to the next end are one `Stretch`; with drafts
  those up to the next end for which the choice of drafts is the same.
- With `share_prompts`, of running members of a group one computes the prompt and the others copy
  it once it is there, for nothing (as the engine does); each holds it in the cache for itself.
- In order of arrival what waits is admitted, up to `capacity`, while the cache has room for its
  tokens and `watermark` beyond. When the next iteration would not fit, the newest gives up its
  place, its cache is lost, and it waits at the head.

Holds true between two stretches: `kv_tokens` and what is still to be taken in never exceed
`kv_capacity`. Knows nothing of commands, facts or the time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from math import ceil, inf

from rhymeflow.core.types import GroupId, TrajectoryId, Version
from rhymeflow.sim.drafts import CLASSES, Choice, class_of
from rhymeflow.sim.hardware import Hardware, Tally
from rhymeflow.sim.lane import ROUNDING, Lane, Place
from rhymeflow.sim.response import Response
from rhymeflow.sim.stretch import Stretch


class Batch:
    """What an instance has been given.

    Args:
        hardware: that it runs on.
        tally: where tokens and preemptions are counted.
    """

    def __init__(self, hardware: Hardware, tally: Tally) -> None:
        self.hardware, self.tally = hardware, tally
        self.running: OrderedDict[TrajectoryId, Place] = OrderedDict()
        """In order of admission."""
        self.waiting: OrderedDict[TrajectoryId, Response] = OrderedDict()
        """In the order in which they are to be admitted."""
        self.chunks: list[tuple[Place, int]] = []
        """What the stretch under way takes in; then it is one iteration."""
        self._stretch: Stretch | None = None
        self._taking_in: list[Place] = []
        """Those of the running that do not decode yet."""
        self._lanes = [Lane() for _ in range(CLASSES if hardware.drafts is not None else 1)]
        """By class (`drafts.class_of`); without drafts there is but one."""
        self._serial = 0
        self._clock: float = 0
        self._choice: Choice | None = None
        """Drafts of the stretch under way; None: there are none at all."""
        self._growth: float = 0
        """Tokens that an iteration of the stretch under way makes of those that decode."""
        self._hurried: frozenset[TrajectoryId] = frozenset()
        self._urgency = 1.0
        self._cached: float = 0
        """Tokens in the cache."""
        self._owed = 0
        """Tokens still to be taken in by those that run; their room is taken already."""

    def kv_tokens(self, iterations: int) -> int:
        """Tokens in the cache when so many iterations of the stretch under way are over."""
        return round(self._cached + (0 if self.chunks else self._growth * iterations))

    def clock(self, iterations: int) -> float:
        """Tokens that one decoded all the time would have made by then."""
        return float(self._clock + self._pace * iterations)

    def everything(self) -> list[Response]:
        """All that runs or waits, as of when it was last looked at."""
        return [place.response for place in self.running.values()] + list(self.waiting.values())

    # -- between stretches -------------------------------------------------------------------

    def submit(self, response: Response) -> None:
        """One more waits."""
        trajectory = response.id
        assert trajectory not in self.running, f"{trajectory} is here already"
        assert trajectory not in self.waiting, f"{trajectory} is here already"
        self.waiting[trajectory] = response

    def stop(self, trajectories: Iterable[TrajectoryId]) -> list[Response]:
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
            flow = place.look()
            # The newest token was sampled, but has not been through the model.
            self._cached -= response.prompt_tokens + flow - 1
            self._leave_lane(place, flow)
        return response

    def _leave_lane(self, place: Place, flow: float) -> None:
        """It does not decode any more; a fraction of a token was not made."""
        assert place.lane is not None
        place.lane.count -= 1
        self.tally.tokens_made += place.response.made - flow

    def store(self) -> None:
        """What is made of those that run is safe."""
        for place in self.running.values():
            if not place.todo:
                place.look()
            place.response.store()

    def hurry(self, trajectories: Iterable[TrajectoryId], urgency: float) -> None:
        """Tokens of these, here or to come, are worth `urgency`, those of all others 1."""
        self._hurried, self._urgency = frozenset(trajectories), urgency
        if self.hardware.drafts is None:
            return
        for trajectory, place in self.running.items():
            lane = self._lane_of(place.response)
            if not place.todo and place.lane is not lane:
                assert place.lane is not None
                place.gone = True
                place.lane.count -= 1
                fresh = Place(place.response)
                fresh.todo, fresh.untouched = 0, False
                self.running[trajectory] = fresh
                self._enter(fresh, place.ends_at - place.lane.clock)

    def change_weights(self, version: Version) -> None:
        """What runs goes on under `version`, with its cache or by taking it all in again."""
        if self.hardware.keep_cache:
            for place in self.running.values():
                if not place.todo:
                    place.response.goes_on_under(version)
        else:
            self._take_in_all()

    def begin(self, now: float) -> Stretch | None:
        """Admit what there is room for, and say what comes next; None: nothing runs."""
        if not self._make_room():
            self._admit()
        self._stretch = self._next_stretch(now) if self.running else None
        return self._stretch

    def end(self, version: Version) -> list[Response]:
        """The stretch is over, as far as it was not cut; return what is complete with it.

        `version` is of the weights that it ran under.
        """
        stretch = self._stretch
        assert stretch is not None
        if not stretch.iterations:  # cut before it began
            self.chunks = []
            return []
        self._pass(stretch.iterations)
        if self.chunks:
            self._take_in(version)
        return [
            self._vacate(self.running.pop(place.response.id))
            for lane in self._lanes
            for place in lane.complete()
        ]

    # -- inside ------------------------------------------------------------------------------

    @property
    def _num_decoding(self) -> int:
        return len(self.running) - len(self._taking_in)

    @property
    def _pace(self) -> float:
        """Tokens that one trajectory makes in an iteration of the stretch under way."""
        if self._choice is None or not self._num_decoding:
            return 1
        return self._growth / self._num_decoding

    def _pass(self, iterations: int) -> None:
        """So many iterations are over."""
        tokens = self._growth * iterations
        self._clock += self._pace * iterations
        self._cached += tokens
        self.tally.tokens_made += tokens
        for lane in self._lanes:
            if lane.count:
                lane.clock += lane.gain * iterations
        if self._choice is not None:
            num_decoding = self._num_decoding
            self.tally.turns += num_decoding * iterations
            self.tally.drafted += (self._choice.rows - num_decoding) * iterations
            self.tally.accepted += (self._growth - num_decoding) * iterations

    def _next_stretch(self, now: float) -> Stretch:
        cost = self.hardware.cost
        if self._taking_in:
            tokens = self._plan_chunks()
            seconds = cost.iteration(self._choose(), self._cached) + cost.prefill_token * tokens
            return Stretch(now, seconds, 0.0, 1)
        seconds = cost.iteration(self._choose(), self._cached)
        growth = self._growth
        room = int((self.hardware.kv_capacity - self._cached + ROUNDING) // growth)
        assert room >= 1, "the next iteration does not fit"
        iterations = min(room, *[lane.iterations() for lane in self._lanes if lane.count])
        until = self._choice.until - ROUNDING if self._choice is not None else inf
        if until < self._cached + growth * iterations:
            iterations = ceil((until - self._cached) / growth)
        return Stretch(now, seconds, cost.k1 * growth, iterations)

    def _choose(self) -> int:
        """Say how many tokens the next iterations draft and make; return the rows of each."""
        drafts, num_decoding = self.hardware.drafts, self._num_decoding
        self._choice, self._growth = None, num_decoding
        if drafts is None or not num_decoding:
            return num_decoding
        a, b, c, d = self._lanes
        counts = a.count, b.count, c.count, d.count
        choice = drafts.choose(counts, self._urgency if c.count or d.count else 1.0, self._cached)
        if self._cached + self._owed + choice.made > self.hardware.kv_capacity + ROUNDING:
            choice = drafts.none(counts)
        self._choice, self._growth = choice, choice.made
        a.gain, b.gain, c.gain, d.gain = choice.gains
        return choice.rows

    def _lane_of(self, response: Response) -> Lane:
        if self.hardware.drafts is None:
            return self._lanes[0]
        return self._lanes[class_of(response.known, response.id in self._hurried)]

    def _enter(self, place: Place, remaining: float) -> None:
        """It decodes."""
        self._serial += 1
        self._lane_of(place.response).enter(place, remaining, self._serial)

    def _take_in_all(self) -> None:
        """Nothing cached is valid any more."""
        self._cached = self._owed = 0
        for key, place in self.running.items():
            if not place.todo:
                self._leave_lane(place, place.look())
            place.gone = True
            self.running[key] = fresh = Place(place.response)
            self._owed += fresh.todo
        for lane in self._lanes:
            lane.clear()
        self._taking_in = list(self.running.values())

    def _make_room(self) -> bool:
        """Preempt until the next iteration fits; return whether anything was preempted."""
        capacity = self.hardware.kv_capacity
        preempted = False
        while self._cached + self._owed + self._num_decoding > capacity + ROUNDING:
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
            num_decoding = self._num_decoding
            margin = max(hardware.watermark, num_decoding) if self.running else 0
            taken = self._cached + self._owed + place.todo
            if taken + margin > hardware.kv_capacity + ROUNDING:
                return
            del self.waiting[trajectory]
            self.running[trajectory] = place
            self._taking_in.append(place)
            self._owed += place.todo

    def _plan_chunks(self) -> int:
        """Say what the next iteration takes in; return how many tokens."""
        budget = self.hardware.max_prefill_tokens
        held = self._share() if self.hardware.share_prompts else frozenset()
        self.chunks = []
        for place in self._taking_in:
            if not budget:
                break
            if place not in held:
                num_new = min(place.todo, budget)
                self.chunks.append((place, num_new))
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

    def _take_in(self, version: Version) -> None:
        """The chunks under way are in the cache; who has all of them gets a token."""
        completed = False
        for place, num_new in self.chunks:
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
                response.goes_on_under(version)
                self._enter(place, response.length - response.made - 1)
        self.chunks = []
        if completed:
            self._taking_in = [place for place in self._taking_in if place.todo]
