"""A fake run's clock, its chance, which follows from a seed, and the account of its faults."""

import random
from collections import Counter

MOST_TURNS = 200_000  # a run that takes more has hung


class Killed(BaseException):
    """The controller's process has died: nothing that it still does has an effect."""


class World:
    """Virtual time, random choices and faults of one run. `num_faults` are injected at most:
    deaths, stops, full disks. `often` is the probability of one at each of a controller's or
    worker's steps."""

    def __init__(self, seed: int, num_faults: int = 0, often: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.counts: Counter[str] = Counter()  # faults so far, by kind
        self.num_left, self._often = num_faults, often
        self._num_turns = 0

    def clock(self) -> float:
        return self.now

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def strikes(self, share: float = 1.0) -> bool:
        """Whether a fault is due, which the caller injects and counts; `share` of the usual."""
        return self.num_left > 0 and self.rng.random() < share * self._often

    def count(self, kind: str) -> None:
        self.counts[kind] += 1
        self.num_left -= 1

    def turn(self) -> None:
        self._num_turns += 1
        assert self._num_turns < MOST_TURNS, "the run does not end"
