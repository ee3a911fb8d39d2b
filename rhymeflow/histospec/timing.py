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
_FEWER_SHARE = 0.5
"""The share of an iteration that is taken to shrink with its rows below the least that was seen."""
_HOPEFUL_SHARE = 0.05
_HOPEFUL_ROWS = 1.5
"""Up to so many times the most rows seen, more rows are taken to cost only that share of what they
would in proportion; past that, as much as in proportion. Whoever decides by the curve then tries
more rows where they may be of use, step by step, and learns what they cost."""
_FEW = 3
"""A bin with fewer iterations is not believed when it says that rows cost more than in proportion:
one of them may have been held up."""
_FADE = 0.998
"""Forgetting per iteration of what the cost of cached tokens is learned from."""
_DOUBT = 4.0
"""Weight of the assumption that cached tokens cost nothing: that of so many iterations with twice
as many as usual. A wrong cost misleads whenever a bin was not seen for long."""
_CLIP = 3.0
"""Deviations count up to this many times the usual one."""

Floats = NDArray[np.float64]


class Curve:
    """Seconds by rows at one number of cached tokens: straight lines between knots."""

    __slots__ = ("rows", "seconds")

    def __init__(self, rows: Floats, seconds: Floats) -> None:
        self.rows, self.seconds = rows, seconds

    def at(self, rows: float) -> float:
        """Seconds of an iteration of so many rows."""
        return at(float(rows), self.rows, self.seconds)


@njit(cache=True)
def at(rows, knots, seconds):
    """Seconds of an iteration of `rows` rows on the curve of these knots, compiled."""
    last = len(knots) - 1
    if rows >= knots[last]:
        return seconds[last] * rows / knots[last]
    if rows < knots[0]:
        return seconds[0] * (1 - _FEWER_SHARE * (knots[0] - rows) / knots[0])
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
        self._means = np.zeros((_BINS, 2))
        """Of each bin over a long time: cached tokens, seconds."""
        self._slope = np.zeros(4)
        """Of seconds by cached tokens, within bins: sums of squares and products, the usual
        relative deviation, and the slope itself."""

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
            self._rows, self._kv, self._seconds, self._seen, self._means, self._slope,
            bin_of(rows), float(rows), float(kv_tokens), seconds,
        )  # fmt: skip

    def curve(self, kv_tokens: int) -> Curve:
        """Seconds by rows over so many cached tokens. Something must have been observed."""
        assert self.is_known
        return Curve(
            *_knots(
                self._rows, self._kv, self._seconds, self._seen, self.kv_slope, float(kv_tokens)
            )
        )

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


@njit(cache=True)
def _note(rows, kv, seconds, seen, means, slope, place, new_rows, new_kv, new_seconds):
    if seen[place] >= _FEW:
        away = new_kv - means[place, 0]
        usual = max(slope[2], 1e-3) * means[place, 1]
        off = new_seconds - means[place, 1] - slope[3] * away
        off = min(max(off, -_CLIP * usual), _CLIP * usual)
        slope[2] += 0.05 * (min(abs(off) / means[place, 1], 1.0) - slope[2])
        off += slope[3] * away
        slope[0] = _FADE * slope[0] + away * away
        slope[1] = _FADE * slope[1] + away * off
        slope[3] = max(slope[1] / (slope[0] + _DOUBT * (1 + means[place, 0] ** 2)), 0.0)
        pace = max(1.0 / (seen[place] + 1), 0.01)
        means[place, 0] += pace * away
        means[place, 1] += pace * off
    else:
        means[place, 0] += (new_kv - means[place, 0]) / (seen[place] + 1)
        means[place, 1] += (new_seconds - means[place, 1]) / (seen[place] + 1)
    at = seen[place] % rows.shape[1]
    rows[place, at], kv[place, at], seconds[place, at] = new_rows, new_kv, new_seconds
    seen[place] += 1


@njit(cache=True)
def _knots(rows, kv, seconds, seen, slope, kv_tokens):
    """Mean rows and level of every bin seen, made monotone (pool adjacent), and a hopeful last."""
    bins, kept_most = rows.shape
    at = np.empty(bins + 1)
    level, weight = np.empty(bins), np.empty(bins)
    first = np.empty(bins + 1, np.int64)
    found = pooled = 0
    for place in range(bins):
        kept = min(seen[place], kept_most)
        if not kept:
            continue
        at[found] = rows[place, :kept].mean()
        value = np.median(seconds[place, :kept] + slope * (kv_tokens - kv[place, :kept]))
        value = max(value, 1e-9)
        if kept < _FEW and found:
            value = min(value, level[pooled - 1] * at[found] / at[found - 1])
        level[pooled], weight[pooled], first[pooled] = value, kept, found
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
    out = np.empty(found + 1)
    for block in range(pooled):
        out[first[block] : first[block + 1]] = level[block]
    at[found] = at[found - 1] * _HOPEFUL_ROWS + 1
    out[found] = out[found - 1] * (1 + _HOPEFUL_SHARE * (at[found] / at[found - 1] - 1))
    return at[: found + 1], out


__all__ = ["Curve", "IterationTime", "at", "bin_of"]
