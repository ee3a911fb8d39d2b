"""Whether an iteration searches for drafts, so that trying where nothing comes of it costs little.

Search runs while the budget is positive; savings refill it (capped), losses drain it. A trial
begins with an initial budget; when it is used up there is no search for a while, and then the next
trial begins.

**What it can cost.** The budget is at most the initial one and all that this trial saved, and no
draft may cost more than is left (`max_loss`), so a trial loses at most its initial budget, as far
as times are known. After a trial that lost, the pause lasts until that loss is less than `share` of
the time since. The share begins at `_FIRST_SHARE`, so that drafts which begin to pay are not missed
for long, and is halved after each trial that lost, down to `_LAST_SHARE`. So pauses grow by powers
of two to a bound, and losses stay below `_LAST_SHARE` of the time, apart from a few initial
budgets.

A batch that has fallen to half since the last trial ends the pause: few rows make drafts cheap.

Knows nothing of clocks: seconds are handed in.
"""

from __future__ import annotations

_FIRST_SHARE = 0.02
_LAST_SHARE = 0.005
_INITIAL_SEARCHES = 3.0
"""An initial budget pays for so many searches that find nothing ..."""
_INITIAL_ITERATIONS = 0.1
"""... and so much of an iteration, for drafts that are refused."""
_LIMIT = 4.0
"""Most that the budget holds, in iterations: so many bad ones in a row are bad luck."""


class ExplorationBudget:
    """Decides, iteration by iteration, whether to search."""

    def __init__(self) -> None:
        self._left: float | None = None
        """Seconds that are left of the running trial's budget; None: between two trials."""
        self._lost = 0.0
        """Seconds that the running trial lost, if it did."""
        self._pause = 0.0
        """Seconds until the next trial."""
        self._share = _FIRST_SHARE
        self._tried_with = 0
        """Sequences at the last search."""
        self._search = 0.0
        """Seconds a search takes; falls at once and rises slowly."""

    def allows_search(self, sequences: int) -> bool:
        """Whether to search for so many sequences now."""
        if self._left is None and self._pause > 0 and sequences <= self._tried_with // 2:
            self._pause, self._share = 0.0, _FIRST_SHARE
        return self._left is not None or self._pause <= 0

    @property
    def is_used_up(self) -> bool:
        """Whether the last trial has ended."""
        return self._left is None

    def max_loss(self, plain: float) -> float:
        """Seconds that may be lost now, where an iteration without drafts takes `plain`."""
        return self._initial_budget(plain) if self._left is None else self._left

    def _initial_budget(self, plain: float) -> float:
        return _INITIAL_SEARCHES * self._search + _INITIAL_ITERATIONS * plain

    def rested(self, seconds: float) -> None:
        """An iteration without a search took so long."""
        self._pause -= seconds

    def searched(self, sequences: int, *, search: float, saved: float, plain: float) -> None:
        """An iteration with a search: seconds of that, seconds saved all in all (below 0: lost).

        `plain`: seconds of an iteration without drafts.
        """
        if not self._search:
            # The first search also loads all compiled code, which says nothing of later ones.
            loading = max(search - _INITIAL_ITERATIONS * plain, 0.0)
            search -= loading
            saved += loading
        self._search = min(search, 0.8 * (self._search or search) + 0.2 * search)
        initial = self._initial_budget(plain)
        if self._left is None:
            self._left, self._lost = initial, 0.0
        self._tried_with = sequences
        self._left = min(self._left + saved, initial + _LIMIT * plain)
        self._lost -= saved
        if self._left >= initial + plain:
            self._share, self._lost, self._pause = _FIRST_SHARE, 0.0, 0.0
        if self._left <= 0:
            self._pause = max(self._lost, initial) / self._share
            self._share = max(self._share / 2, _LAST_SHARE)
            self._left = None


__all__ = ["ExplorationBudget"]
