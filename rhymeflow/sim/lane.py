"""Trajectories that decode at one pace: a clock, and a heap of the times on it at which they end.

The clock counts the tokens that one of the lane makes. It is a whole number as long as there are no
drafts; with drafts it advances by what an iteration makes on average. Then what a response has made
lies between two whole numbers; to everybody else it is the lower one. A response is complete with
the iteration in which the clock reaches its end, and has exactly its length.

Knows nothing of the cache or of seconds.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import ceil

from rhymeflow.sim.response import Response

ROUNDING = 1e-6
"""Tokens; sums of fractions are off by less."""


class Place:
    """A response among those that run."""

    __slots__ = ("ends_at", "gone", "lane", "response", "todo", "untouched")

    def __init__(self, response: Response) -> None:
        self.response = response
        self.todo = response.prompt_tokens + response.made
        """Tokens to take in before it decodes."""
        self.untouched = True
        """Nothing of it is in the cache."""
        self.lane: Lane | None = None
        """Where it is, once it decodes."""
        self.ends_at: float = 0
        """The time of the lane's clock at which it has its last token."""
        self.gone = False

    def flow(self) -> float:
        """Tokens made by the clock, a fraction and what goes beyond the end included."""
        assert self.lane is not None
        return self.response.length - (self.ends_at - self.lane.clock)

    def look(self) -> float:
        """Enter in the response what is made of it; return the same by the clock."""
        flow = self.flow()
        self.response.made = min(self.response.length, int(flow + ROUNDING))
        return flow


class Lane:
    """Those that decode at one pace."""

    __slots__ = ("clock", "count", "ends", "gain")

    def __init__(self) -> None:
        self.clock: float = 0
        self.gain: float = 1
        """Tokens that one makes in an iteration."""
        self.count = 0
        """Trajectories in it."""
        self.ends: list[tuple[float, int, Place]] = []
        """Heap of (ends_at, serial, place) of those in it, and of some that are gone."""

    def enter(self, place: Place, remaining: float, serial: int) -> None:
        """One more decodes, to its end in so many tokens."""
        place.lane, place.ends_at = self, self.clock + remaining
        self.count += 1
        heappush(self.ends, (place.ends_at, serial, place))

    def iterations(self) -> int:
        """How many it takes until the next is complete. There is one."""
        while self.ends[0][2].gone:
            heappop(self.ends)
        return ceil((self.ends[0][0] - self.clock - ROUNDING) / self.gain)

    def complete(self) -> list[Place]:
        """Those that have reached their ends; they are no longer in the heap."""
        ends, reached, found = self.ends, self.clock + ROUNDING, []
        while ends and ends[0][0] <= reached:
            place = heappop(ends)[2]
            if not place.gone:
                found.append(place)
        return found

    def clear(self) -> None:
        """Nobody decodes here any more."""
        self.ends.clear()
        self.count = 0
