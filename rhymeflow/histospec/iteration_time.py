"""How long an iteration of the engine takes, learned from the iterations it runs.

An iteration in which n sequences decode, d drafted tokens are verified and o rows of prompts are
prefilled, over K cached tokens, is taken to last

    line * bend(n + d + o),    line = a + b n + c d + e o + k K

seconds. The four kinds have prices of their own: a prompt's row is not sampled, a drafted one needs
no sequence of its own. The line is a regression over all that was seen, in relative errors, so a
few iterations of any mix say something of every other mix. The bend says what no line can: a GPU's
time is flat and then steep, a CPU's rises in steps. It is the median of actual over line of recent
iterations, in each of a row of bins, shrunk towards 1 where there are few; it is computed at most
once for each iteration observed, and only when times are asked for.

What was never seen is assumed: half of an iteration's time is fixed, and a drafted token costs a
tenth of a sequence. That counts for a tenth of an iteration, and `doubt` says how little is known.

Holds true: what is predicted never falls with drafted rows; one iteration that was held up by
something else moves nothing much; no price is below 0. Knows nothing of clocks or of whether drafts
are accepted: seconds are handed in.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

_EXACT = 16
"""Up to this many rows each number has its own bin."""
_PER_OCTAVE = 4
"""Bins per doubling beyond."""
_OCTAVES = 16
_BINS = _EXACT + _PER_OCTAVE * _OCTAVES
_KEPT = 32
"""Iterations remembered per bin."""
_PRICES = 5
"""a, b, c, e, k."""
_FIXED, _SEQUENCE, _DRAFTED, _PROMPT, _CACHED = range(_PRICES)
_FEW = 3
"""With fewer iterations than these nothing is decided by the model."""
_FADE = 0.998
"""Forgetting of the line per iteration."""
_ASSUMED = 0.1
"""Weight of the assumptions on prices, in iterations of the usual size; at noise of 10% they are
then known to a third of an iteration's time."""
_SEQUENCE_SHARE = 0.5
_DRAFTED_SHARE = 0.1
_STRAIGHT = 2.0
"""Weight of the assumption that a bin lies on the line, in iterations."""
_LEAST_NOISE = 0.1
"""Iterations are taken to differ at least by this much of themselves."""
_DOUBTED = 0.2
"""What is kept of what was learned of drafted tokens when it is doubted."""
_CLIP = 3.0
"""Deviations count up to this many times the usual one."""

Floats = NDArray[np.float64]


class IterationTime:
    """The model of one engine on one machine."""

    def __init__(self) -> None:
        self._kept = np.zeros((_BINS, _KEPT, _PRICES + 1))
        """Of each iteration: 1, n, d, o, K and seconds."""
        self._seen = np.zeros(_BINS, np.int64)
        self._sums = np.zeros((_PRICES, _PRICES + 1))
        """Of products of an iteration's numbers, over the square of its seconds."""
        self._prices = np.zeros(_PRICES)
        self._spread = np.zeros(2)
        """The usual relative deviation, and how little the price of a drafted token is known."""
        self._bend: tuple[Floats, Floats] | None = None
        """Rows, and actual time over the line there; None: to be computed again."""

    @property
    def is_known(self) -> bool:
        """Whether a few iterations were observed."""
        return int(self._seen.sum()) >= _FEW

    @property
    def prices(self) -> Floats:
        """Seconds of an iteration, a sequence, a drafted token, a prompt's row, a cached token."""
        return self._prices.copy()

    @property
    def doubt(self) -> float:
        """Standard error of a drafted token's price, seconds."""
        return float(self._spread[1])

    def observe(
        self, sequences: int, drafted: int, prompt_rows: int, kv_tokens: int, seconds: float
    ) -> None:
        """An iteration of `sequences` > 0 took `seconds` > 0."""
        rows = sequences + drafted + prompt_rows
        assert sequences > 0
        assert seconds > 0
        bin = bin_of(rows)
        row = self._kept[bin, self._seen[bin] % _KEPT]
        row[:] = 1.0, sequences, drafted, prompt_rows, kv_tokens, seconds
        _learn(row, self._sums, self._prices, self._spread, int(self._seen.sum()))
        self._seen[bin] += 1
        self._bend = None

    def doubt_drafted(self) -> None:
        """Most of what was learned of drafted tokens is forgotten, in favour of the assumptions.

        What is thought too dear is not verified, and so would be thought so for ever, if it was
        only held up when it was tried.
        """
        self._sums[_DRAFTED] *= _DOUBTED
        # The element on the diagonal has been reduced above.
        kept = self._sums[_DRAFTED, _DRAFTED]
        self._sums[:, _DRAFTED] *= _DOUBTED
        self._sums[_DRAFTED, _DRAFTED] = kept
        for place in np.flatnonzero(self._seen):
            rows = self._kept[place, : min(self._seen[place], _KEPT)]
            drafted = rows[:, _DRAFTED] > 0
            # Of drafted ones every other is kept: of a single one, nothing.
            left = rows[~drafted | (np.cumsum(drafted) % 2 == 0)]
            self._kept[place, : len(left)] = left
            self._seen[place] = len(left)
        if self._seen.any():
            _price(self._sums, self._prices, self._spread)
        self._bend = None

    def seconds(self, sequences: int, prompt_rows: int, kv_tokens: int, max_drafted: int) -> Floats:
        """Seconds of an iteration with 0, 1, ... `max_drafted` drafted tokens.

        Something must have been observed.
        """
        assert self._seen.any()
        if self._bend is None:
            self._bend = _draw_bend(self._kept, self._seen, self._prices)
        iteration = np.array([1.0, sequences, 0.0, prompt_rows, kv_tokens])
        return _seconds(iteration, max_drafted, *self._bend, self._prices)


def bin_of(rows: int) -> int:
    """The bin of a number of rows, from 1."""
    if rows <= _EXACT:
        return rows - 1
    return min(_EXACT + int(_PER_OCTAVE * np.log2(rows / _EXACT)), _BINS - 1)


@njit(cache=True)
def _learn(row, sums, prices, spread, seen):
    """Take an iteration into the line, and solve for it."""
    seconds = row[_PRICES]
    size = seconds
    if seen >= _FEW:
        size = _line(row, prices)
        usual = max(spread[0], _LEAST_NOISE) * size + spread[1] * row[_DRAFTED]
        seconds = min(max(seconds, size - _CLIP * usual), size + _CLIP * usual)
        spread[0] += 0.05 * (1.25 * abs(seconds / size - 1) - spread[0])
    sums *= _FADE
    for i in range(_PRICES):
        for j in range(_PRICES):
            sums[i, j] += row[i] * row[j] / size**2
        sums[i, _PRICES] += row[i] * seconds / size**2
    _price(sums, prices, spread)


@njit(cache=True)
def _price(sums, prices, spread):
    """The prices that fit what was seen and what is assumed."""
    full = sums.copy()
    _assume(full)
    least = _LEAST_NOISE if spread[0] < _LEAST_NOISE else spread[0]
    spread[1] = least * np.sqrt(_variance(full, _DRAFTED))
    _solve(full, prices)


@njit(cache=True)
def _line(row, prices):
    total = 0.0
    for i in range(_PRICES):
        total += row[i] * prices[i]
    return max(total, 1e-9)


@njit(cache=True)
def _assume(sums):
    """Add the assumptions, as if they had been seen in iterations of the usual size."""
    weight = sums[0, 0]
    seconds = sums[0, _PRICES] / weight
    sequences = sums[0, _SEQUENCE] / weight
    cached = sums[0, _CACHED] / weight
    unit = _ASSUMED / seconds**2
    per_sequence = unit * sequences**2
    sums[_SEQUENCE, _SEQUENCE] += per_sequence
    sums[_SEQUENCE, _PRICES] += unit * sequences * _SEQUENCE_SHARE * seconds
    for one, other, share in (
        (_DRAFTED, _SEQUENCE, _DRAFTED_SHARE),
        (_PROMPT, _DRAFTED, 1.0),
    ):
        sums[one, one] += per_sequence
        sums[one, other] -= per_sequence * share
        sums[other, one] -= per_sequence * share
        sums[other, other] += per_sequence * share**2
    sums[_CACHED, _CACHED] += 10 * unit * max(cached, 1.0) ** 2


@njit(cache=True)
def _solve(sums, prices):
    """The prices that fit best; those that would be below 0 are 0."""
    free = np.ones(_PRICES, np.bool_)
    while True:
        system = sums.copy()
        for i in range(_PRICES):
            if not free[i]:
                system[i, :] = 0.0
                system[:, i] = 0.0
                system[i, i] = 1.0
        _eliminate(system)
        worst, value = -1, -1e-15
        for i in range(_PRICES):
            if free[i] and system[i, _PRICES] < 0:
                relative = system[i, _PRICES] * np.sqrt(sums[i, i])
                if relative < value:
                    worst, value = i, relative
        if worst < 0:
            break
        free[worst] = False
    for i in range(_PRICES):
        prices[i] = max(system[i, _PRICES], 0.0)


@njit(cache=True)
def _variance(sums, place):
    """The diagonal element of the inverse."""
    system = sums.copy()
    system[:, _PRICES] = 0.0
    system[place, _PRICES] = 1.0
    _eliminate(system)
    return max(system[place, _PRICES], 0.0)


@njit(cache=True)
def _eliminate(system):
    """Solve a positive definite system in place; the solution is in its last column."""
    size = len(system)
    for i in range(size):
        pivot = system[i, i]
        for j in range(i, size + 1):
            system[i, j] /= pivot
        for other in range(size):
            if other != i:
                share = system[other, i]
                for j in range(i, size + 1):
                    system[other, j] -= share * system[i, j]


@njit(cache=True)
def _draw_bend(kept, seen, prices):
    """Rows and actual time over the line, a knot at each bin in which something was seen."""
    bins, most, _ = kept.shape
    knots, bend = np.empty(bins), np.empty(bins)
    found = 0
    for place in range(bins):
        count = min(seen[place], most)
        if not count:
            continue
        rows, ratios = 0.0, np.empty(count)
        for i in range(count):
            row = kept[place, i]
            rows += row[_SEQUENCE] + row[_DRAFTED] + row[_PROMPT]
            ratios[i] = row[_PRICES] / _line(row, prices)
        knots[found] = rows / count
        bend[found] = (count * np.median(ratios) + _STRAIGHT) / (count + _STRAIGHT)
        found += 1
    return knots[:found], bend[:found]


@njit(cache=True)
def _seconds(iteration, max_drafted, knots, bend, prices):
    """The line times the bend between its knots; never less than with fewer drafted tokens."""
    seconds = np.empty(max_drafted + 1)
    first, line = iteration[_SEQUENCE] + iteration[_PROMPT], _line(iteration, prices)
    right = np.searchsorted(knots, first, side="right")
    for drafted in range(max_drafted + 1):
        rows = first + drafted
        while right < len(knots) and knots[right] <= rows:
            right += 1
        if right == 0:
            bent = bend[0]
        elif right == len(knots):
            bent = bend[right - 1]
        else:
            share = (rows - knots[right - 1]) / (knots[right] - knots[right - 1])
            bent = bend[right - 1] + share * (bend[right] - bend[right - 1])
        seconds[drafted] = (line + prices[_DRAFTED] * drafted) * bent
        if drafted:
            seconds[drafted] = max(seconds[drafted], seconds[drafted - 1])
    return seconds


__all__ = ["IterationTime", "bin_of"]
