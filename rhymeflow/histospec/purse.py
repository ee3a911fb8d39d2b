"""Whether this iteration looks for drafts at all, so that trying costs next to nothing.

Searching takes time even where nothing comes of it. So it is tried with a stake. While the purse
holds something there is a search in every iteration; what an iteration saves goes in, up to a
limit, what it loses comes out. Once the purse is empty there is none for a while, and then the next
try begins with a new stake.

**What it can cost.** The purse never holds more than the stake and all that was saved in this try,
and no draft may cost more than it holds (`risk`), so a try loses at most its stake, as far as times
are known. After a try that lost, the pause lasts until that loss is less than `share` of the time
since; the share begins at `_FIRST_SHARE`, so that a beginning is not missed, and is halved after
each try that lost, down to `_LAST_SHARE`. The pauses between tries that lose therefore grow by
powers of two to a bound, and what they lose stays below `_LAST_SHARE` of the time, apart from a few
stakes.

A batch that has fallen to half since the last try is a reason to try at once: few rows make drafts
cheap. That is rare. So are sequences that are in a hurry, if there were none at the last try: what
they gain counts for more. There is at most one such try to each other one, and if it loses, its
pause comes on top of the one that it broke.

**In a hurry** a token is worth what its sequence weighs, and a second what the batch makes in it,
in tokens so weighed: seconds saved are seconds' worth. A purse that was filled so may hold more
than was saved; once the hurry is over it holds a stake at most.

Knows nothing of clocks: seconds are handed in.
"""

from __future__ import annotations

_FIRST_SHARE = 0.02
_LAST_SHARE = 0.005
_STAKE_SEARCHES = 3.0
"""A stake is enough for so many searches that find nothing ..."""
_STAKE_ITERATIONS = 0.1
"""... and so much of an iteration, for drafts that are refused."""
_LIMIT = 4.0
"""Most that a purse holds, in iterations: so many bad ones in a row are bad luck."""


class Purse:
    """Decides, iteration by iteration, whether to search."""

    def __init__(self) -> None:
        self._held: float | None = None
        """What the purse holds, seconds; None: between two tries."""
        self._lost = 0.0
        """Seconds that the running try lost, if it did."""
        self._pause = 0.0
        """Seconds until the next try."""
        self._share = _FIRST_SHARE
        self._tried_with = 0
        """Sequences at the last try."""
        self._hurried = False
        """Whether any sequence was in a hurry in the last iteration that was tried."""
        self._has_hurried = False
        """Whether any was in any iteration of the running or last try."""
        self._plain = 0.0
        """Seconds of the last iteration tried, without drafts."""
        self._search = 0.0
        """Seconds a search takes; falls at once and rises slowly."""

    def is_open(self, sequences: int, *, hurried: bool = False) -> bool:
        """Whether to search for so many sequences now; `hurried`: some of them are in a hurry."""
        if self._held is None and self._pause > 0 and sequences <= self._tried_with // 2:
            self._pause, self._share = 0.0, _FIRST_SHARE
        if self._held is not None and self._hurried and not hurried:
            self._held = min(self._held, self._stake(self._plain))
        is_new = hurried and not self._has_hurried
        is_open = self._held is not None or self._pause <= 0 or is_new
        if is_open:
            self._has_hurried = hurried or (self._held is not None and self._has_hurried)
            self._hurried = hurried
        return is_open

    @property
    def is_empty(self) -> bool:
        """Whether the last try has ended."""
        return self._held is None

    def risk(self, plain: float) -> float:
        """Seconds that may be lost now, where an iteration without drafts takes `plain`."""
        return self._stake(plain) if self._held is None else self._held

    def _stake(self, plain: float) -> float:
        return _STAKE_SEARCHES * self._search + _STAKE_ITERATIONS * plain

    def rested(self, seconds: float) -> None:
        """An iteration without a search took so long."""
        self._pause -= seconds

    def tried(self, sequences: int, *, search: float, saved: float, plain: float) -> None:
        """An iteration with a search: seconds of that, seconds saved all in all (below 0: lost).

        `plain`: seconds of an iteration without drafts.
        """
        if not self._search:
            # With the first search of all compiled code is loaded, once: that says nothing.
            held_up = max(search - _STAKE_ITERATIONS * plain, 0.0)
            search -= held_up
            saved += held_up
        self._search = min(search, 0.8 * (self._search or search) + 0.2 * search)
        stake = self._stake(plain)
        if self._held is None:
            self._held, self._lost = stake, 0.0
        self._tried_with, self._plain = sequences, plain
        self._held = min(self._held + saved, stake + _LIMIT * plain)
        self._lost -= saved
        if self._held >= stake + plain:
            self._share, self._lost, self._pause = _FIRST_SHARE, 0.0, 0.0
        if self._held <= 0:
            self._pause = max(self._pause, 0.0) + max(self._lost, stake) / self._share
            self._share = max(self._share / 2, _LAST_SHARE)
            self._held = None


__all__ = ["Purse"]
