"""How long an iteration of the engine takes, learned from the iterations it runs.

An iteration of R rows (new tokens, each of which is run once) over K cached tokens is taken to last
curve(R) + k K seconds. The curve is not given a form: a GPU's is flat and then steep, a CPU's rises
in steps. It is the median of recent iterations in each of a row of bins, made monotone.

Holds true: what is predicted never falls with rows; one iteration that was held up by something
else moves nothing much, since medians are taken; what has not been seen for long is forgotten only
by being seen again. Knows nothing of drafts or clocks: seconds are handed in.
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
_UNSEEN_SHARE = 0.5
"""Before two bins are known: the share of an iteration that is taken to grow with its rows."""
_FADE = 0.998
"""Forgetting per iteration of what the cost of cached tokens is learned from."""
_CLIP = 3.0
"""Deviations count up to this many times the usual one."""

Floats = NDArray[np.float64]


class Curve:
    """Seconds by rows at one number of cached tokens: straight lines between knots."""

    __slots__ = ("beyond", "rows", "seconds")

    def __init__(self, rows: Floats, seconds: Floats, beyond: float) -> None:
        self.rows, self.seconds, self.beyond = rows, seconds, beyond

    def at(self, rows: float) -> float:
        """Seconds of an iteration of so many rows."""
        return at(float(rows), self.rows, self.seconds, self.beyond)


@njit(cache=True)
def at(rows, knots, seconds, beyond):
    """Seconds of an iteration of `rows` rows on the curve of these knots, compiled.

    Past the last knot by the slope `beyond`; before the first as if half of it grew with rows.
    """
    last = len(knots) - 1
    if rows >= knots[last]:
        return seconds[last] + (rows - knots[last]) * beyond
    if rows < knots[0]:
        return seconds[0] * (1 - _UNSEEN_SHARE * (knots[0] - rows) / knots[0])
    left = np.searchsorted(knots, rows, side="right") - 1
    share = (rows - knots[left]) / (knots[left + 1] - knots[left])
    return seconds[left] + share * (seconds[left + 1] - seconds[left])


class IterationTime:
    """The model of one engine on one machine. `is_known`: it has seen an iteration."""

    def __init__(self) -> None:
        self._rows = np.zeros((_BINS, _KEPT))
        self._kv = np.zeros((_BINS, _KEPT))
        self._seconds = np.zeros((_BINS, _KEPT))
        self._seen = np.zeros(_BINS, np.int64)
        self._slope = np.zeros(4)
        """Of seconds by cached tokens: sums of squares and products, the usual relative deviation,
        and the slope itself."""

    @property
    def is_known(self) -> bool:
        """Whether an iteration was observed."""
        return bool(self._seen.any())

    @property
    def kv_slope(self) -> float:
        """Seconds per cached token and iteration."""
        return float(self._slope[3])

    def observe(self, rows: int, kv_tokens: int, seconds: float) -> None:
        """An iteration of `rows` > 0 rows over `kv_tokens` cached tokens took `seconds`."""
        assert rows > 0
        _note(
            self._rows, self._kv, self._seconds, self._seen, self._slope,
            bin_of(rows), float(rows), float(kv_tokens), seconds,
        )  # fmt: skip

    def curve(self, kv_tokens: int) -> Curve:
        """Seconds by rows over so many cached tokens. Something must have been observed."""
        assert self.is_known
        rows, seconds = _knots(self._rows, self._kv, self._seconds, self._seen, self.kv_slope)
        seconds = np.maximum(seconds + self.kv_slope * kv_tokens, 1e-9)
        return Curve(rows, seconds, _last_slope(rows, seconds))

    def predict(self, rows: int, kv_tokens: int) -> float:
        """Seconds of one iteration."""
        return self.curve(kv_tokens).at(rows)

    def has_seen(self, rows: int) -> bool:
        """Whether iterations of about as many rows were observed."""
        return bool(self._seen[bin_of(rows)])


def bin_of(rows: int) -> int:
    """The bin of a number of rows, from 1."""
    if rows <= _EXACT:
        return rows - 1
    return min(_EXACT + int(_PER_OCTAVE * np.log2(rows / _EXACT)), _BINS - 1)


def _last_slope(rows: Floats, seconds: Floats) -> float:
    """Slope past the last knot: that of the last doubling of rows, if there is as much."""
    if rows[-1] < 1.5 * rows[0]:
        return float(_UNSEEN_SHARE * seconds[-1] / rows[-1])
    half = np.interp(rows[-1] / 2, rows, seconds)
    return float((seconds[-1] - half) / (rows[-1] - max(rows[-1] / 2, rows[0])))


@njit(cache=True)
def _note(rows, kv, seconds, seen, slope, place, new_rows, new_kv, new_seconds):
    kept = min(seen[place], rows.shape[1])
    if kept >= 4:
        mean_kv = kv[place, :kept].mean()
        level = np.median(seconds[place, :kept] - slope[3] * (kv[place, :kept] - mean_kv))
        away = new_kv - mean_kv
        off = new_seconds - level - slope[3] * away
        usual = max(slope[2], 1e-3) * level
        off = min(max(off, -_CLIP * usual), _CLIP * usual)
        slope[2] += 0.05 * (min(abs(off) / level, 1.0) - slope[2])
        off += slope[3] * away
        slope[0] = _FADE * slope[0] + away * away
        slope[1] = _FADE * slope[1] + away * off
        # A ridge, so that a cache that hardly changes says nothing about its cost.
        ridge = (0.1 * max(mean_kv, 1.0)) ** 2
        slope[3] = max(slope[1] / (slope[0] + ridge), 0.0)
    at = seen[place] % rows.shape[1]
    rows[place, at], kv[place, at], seconds[place, at] = new_rows, new_kv, new_seconds
    seen[place] += 1


@njit(cache=True)
def _knots(rows, kv, seconds, seen, slope):
    """Mean rows and level at an empty cache of every bin seen, made monotone (pool adjacent)."""
    at = np.empty(len(seen))
    level = np.empty(len(seen))
    weight = np.empty(len(seen))
    first = np.empty(len(seen) + 1, np.int64)
    pooled = 0
    found = 0
    row = np.empty(len(seen))
    for place in range(len(seen)):
        kept = min(seen[place], rows.shape[1])
        if not kept:
            continue
        row[found] = rows[place, :kept].mean()
        at[pooled] = row[found]
        level[pooled] = np.median(seconds[place, :kept] - slope * kv[place, :kept])
        weight[pooled] = kept
        first[pooled] = found
        found += 1
        pooled += 1
        while pooled > 1 and level[pooled - 2] > level[pooled - 1]:
            both = weight[pooled - 2] + weight[pooled - 1]
            level[pooled - 2] = (
                weight[pooled - 2] * level[pooled - 2] + weight[pooled - 1] * level[pooled - 1]
            ) / both
            weight[pooled - 2] = both
            pooled -= 1
    first[pooled] = found
    out = np.empty(found)
    for block in range(pooled):
        out[first[block] : first[block + 1]] = level[block]
    return row[:found], out


__all__ = ["Curve", "IterationTime", "at", "bin_of"]
