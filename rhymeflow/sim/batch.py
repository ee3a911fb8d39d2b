"""Continuous batching: who runs, who waits, what is in the cache, and what the next stretch is.

- An iteration with n decoding trajectories and K tokens in the cache lasts as the cost model says;
  each decoding trajectory gets one token.
- One that is admitted first takes in its prompt and what there is of its response, in chunks of at
  most `max_prefill_tokens` an iteration, each token adding `prefill_token` seconds; the iteration
  that completes this makes its next token. Such iterations are stretches of their own.
- Between them n is constant, and all iterations up to the next end are one `Stretch`.
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
from heapq import heappop, heappush

from rhymeflow.core.types import GroupId, TrajectoryId, Version
from rhymeflow.sim.hardware import Hardware, Tally
from rhymeflow.sim.response import Response
from rhymeflow.sim.stretch import Stretch


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
        self._ends: list[tuple[int, int, Place]] = []
        """Heap of (ends_at, serial, place) of those that decode, and of some that are gone."""
        self._serial = 0
        self._iterations = 0
        self._cached = 0
        """Tokens in the cache."""
        self._owed = 0
        """Tokens still to be taken in by those that run; their room is taken already."""

    def kv_tokens(self, iterations: int) -> int:
        """Tokens in the cache when so many iterations of the stretch under way are over."""
        return self._cached + (0 if self.chunks else self._num_decoding * iterations)

    def clock(self, iterations: int) -> float:
        """Tokens that one decoded all the time would have made by then."""
        return float(self._iterations + iterations)

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
            response.made = response.length - (place.ends_at - self._iterations)
            # The newest token was sampled, but has not been through the model.
            self._cached -= response.prompt_tokens + response.made - 1
        return response

    def store(self) -> None:
        """What is made of those that run is safe."""
        for place in self.running.values():
            if not place.todo:
                place.response.made = place.response.length - (place.ends_at - self._iterations)
            place.response.store()

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
        tokens = self._num_decoding * stretch.iterations
        self._iterations += stretch.iterations
        self._cached += tokens
        self.tally.tokens_made += tokens
        if self.chunks:
            self._take_in(version)
        complete = []
        while self._ends and self._ends[0][0] <= self._iterations:
            place = heappop(self._ends)[2]
            if not place.gone:
                complete.append(self._vacate(self.running.pop(place.response.id)))
        return complete

    # -- inside ------------------------------------------------------------------------------

    @property
    def _num_decoding(self) -> int:
        return len(self.running) - len(self._taking_in)

    def _next_stretch(self, now: float) -> Stretch:
        cost, num_decoding = self.hardware.cost, self._num_decoding
        if self._taking_in:
            tokens = self._plan_chunks()
            seconds = cost.iteration(num_decoding, self._cached) + cost.prefill_token * tokens
            return Stretch(now, seconds, 0.0, 1)
        seconds = cost.iteration(num_decoding, self._cached)
        room = (self.hardware.kv_capacity - self._cached) // num_decoding
        iterations = min(self._next_end() - self._iterations, room)
        return Stretch(now, seconds, cost.k1 * num_decoding, iterations)

    def _next_end(self) -> int:
        while self._ends[0][2].gone:
            heappop(self._ends)
        return self._ends[0][0]

    def _take_in_all(self) -> None:
        """Nothing cached is valid any more."""
        self._ends.clear()
        self._cached = self._owed = 0
        for key, place in self.running.items():
            place.gone = True
            self.running[key] = fresh = Place(place.response)
            self._owed += fresh.todo
        self._taking_in = list(self.running.values())

    def _make_room(self) -> bool:
        """Preempt until the next iteration fits; return whether anything was preempted."""
        capacity = self.hardware.kv_capacity
        preempted = False
        while self._cached + self._owed + self._num_decoding > capacity:
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
                place.ends_at = self._iterations - 1 + response.length - response.made
                self._serial += 1
                heappush(self._ends, (place.ends_at, self._serial, place))
        self.chunks = []
        if completed:
            self._taking_in = [place for place in self._taking_in if place.todo]
