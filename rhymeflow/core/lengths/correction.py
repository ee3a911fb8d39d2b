"""By how much responses went on longer than was foretold, at the same stage of a group.

The model of a group (normal levels, members that differ from them alike) is wrong in the tails of
real lengths. So groups that ended are gone through once more as if all members had started
together, and what remained at each mark is set beside what was foretold there. Stages: how many
members had finished (none, fewer than half, more), and how far the others were, in standard
deviations from the prediction at opening.

Holds true: a factor is between a third and three, and 1 where nothing is known.
"""

from __future__ import annotations

_STAGES = (-0.75, 0.0, 0.75, 1.5, 2.25)
"""Where one stage ends and the next begins, in standard deviations."""
_KEEP = 1 - 1 / 1024
_TRUST = 48.0
"""Responses that count for a factor of 1."""


class Correction:
    """Factors on what remains of a response."""

    def __init__(self) -> None:
        size = 3 * (len(_STAGES) + 1)
        self._weight, self._ratio = [0.0] * size, [0.0] * size

    def factor(self, finished: int, size: int, distance: float) -> float:
        """What to multiply with, with so many of a group's `size` members finished."""
        place = _place(finished, size, distance)
        ratio = (_TRUST + self._ratio[place]) / (_TRUST + self._weight[place])
        return min(3.0, max(1 / 3, ratio))

    def learn(
        self, finished: int, size: int, distance: float, *, responses: int, ratio: float
    ) -> None:
        """So many responses went on, on average `ratio` times as long as was foretold."""
        place = _place(finished, size, distance)
        keep = _KEEP**responses
        self._weight[place] = keep * self._weight[place] + responses
        self._ratio[place] = keep * self._ratio[place] + responses * min(ratio, 20.0)


def _place(finished: int, size: int, distance: float) -> int:
    stage = sum(distance >= edge for edge in _STAGES)
    how_many = 0 if finished == 0 else 1 if 2 * finished < size else 2
    return how_many * (len(_STAGES) + 1) + stage
