"""Many decode iterations as one formula.

Holds true: while the same n trajectories decode, every iteration adds n tokens to the cache, so j
iterations that begin with K tokens in it take

    j (k1 K + max(k2, k3 n + c) + k4) + k1 n j (j - 1) / 2   seconds

(the cost model of `core/cost.py`, summed), which is inverted by a square root. Work then grows with
what happens to trajectories, not with their tokens. Knows nothing of trajectories.
"""

from __future__ import annotations

from math import ceil, sqrt


class DecodeSpan:
    """Up to `iterations` iterations from `start` on, the first of which lasts `first` seconds.

    Each further one lasts `growth` seconds longer than the one before.
    """

    __slots__ = ("end", "first", "growth", "iterations", "start")

    def __init__(self, start: float, first: float, growth: float, iterations: int) -> None:
        assert iterations >= 0
        self.start = start
        self.first = first
        self.growth = growth
        self.iterations = iterations
        self.end = self.after(iterations)

    def after(self, iterations: int) -> float:
        """The time at which so many iterations are over."""
        return (
            self.start + iterations * self.first + self.growth * (iterations * (iterations - 1) / 2)
        )

    def over(self, now: float) -> int:
        """How many iterations are over at `now`."""
        if now >= self.end:
            return self.iterations
        j = self._estimate(now)
        while self.after(j + 1) <= now:
            j += 1
        while j > 0 and self.after(j) > now:
            j -= 1
        return j

    def over_before(self, time: float) -> int:
        """The same of a `time` that may be before the beginning: then it is below 0, by as many
        iterations as were over in between if they lasted as long as the first one.
        """
        if time >= self.start:
            return self.over(time)
        return -ceil((self.start - time) / self.first)

    def cut(self, now: float) -> None:
        """End with the iteration that runs at `now`: commands are seen between iterations."""
        if now >= self.end:
            return
        j = self.over(now)
        self.iterations = j if self.after(j) >= now else j + 1
        self.end = self.after(self.iterations)

    def _estimate(self, now: float) -> int:
        """Solve `after(j) = now`, rounded down, right to within float rounding."""
        seconds = now - self.start
        if seconds <= 0:
            return 0
        half = self.growth / 2
        linear = self.first - half
        # The form of the root that does not cancel, and that holds for growth 0 too.
        return int(2 * seconds / (linear + sqrt(linear * linear + 4 * half * seconds)))
