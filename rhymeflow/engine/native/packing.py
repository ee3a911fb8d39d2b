"""Where the tokens of one iteration go in the cache, and which are attended to together.

A block's slots all get as many rows as its widest member, and a run of slots includes those between
its members. So a size class's members are one block, or a narrow and a wide one, whichever costs
least by a simple count.
"""

from __future__ import annotations

from typing import NamedTuple

from rhymeflow.engine.drafter import is_linear
from rhymeflow.engine.native.cache import KVCache, Slot
from rhymeflow.engine.native.scheduler import Plan

WIDTHS = (1, 2, 3, 5, 7, 9, 13, 17, 25, 33)
"""Numbers of rows per slot in blocks, few so that shapes repeat; what is wider is a chunk."""

COPY, CALL = 3, 16
"""Costs, in rows of one slot: of copying its keys and values, and of a block of its own. They are
rough; costs fitted to single calls (6, 4 and 20, a slot's own being the first) were tried and made
no difference beyond the noise."""


class Span(NamedTuple):
    """One sequence's part of the row: `num_new` tokens after `cached` ones.

    Each follows the one before it, but for the last ones if `parents` are given: the tree that
    hangs on the token before them, for each of its tokens the place in the tree of its parent.
    """

    slot: Slot
    cached: int
    num_new: int
    parents: list[int] | None = None


class Part(NamedTuple):
    """Spans that are attended to together, side by side in the row."""

    members: list[int]
    """Their places in the list of spans."""
    width: int
    """Rows of each slot; 0: a chunk."""
    is_run: bool
    """Whether the block is all slots from the first member's to the last's."""


def place(plan: Plan, cache: KVCache) -> list[Span]:
    """Make room in the cache and copy shared prefixes; return the spans of the plan's work."""
    for donor, sequence, length in plan.prefix_copies:
        sequence.slot = cache.reserve(sequence.slot, length)
        cache.copy(donor.slot, sequence.slot, length)
    for sequence, num_new, _draft in plan.work:
        sequence.slot = cache.reserve(sequence.slot, sequence.cached + num_new)
    return [
        Span(sequence.slot, sequence.cached, num_new, None if is_linear(draft) else draft.parents)
        for sequence, num_new, draft in plan.work
    ]


def arranged(spans: list[Span]) -> list[Part]:
    """Every span in one part, so that there are few parts and little is computed in vain."""
    chunks: list[Part] = []
    size_classes: dict[int, list[int]] = {}
    for i, span in enumerate(spans):
        if span.num_new > WIDTHS[-1]:
            chunks.append(Part([i], 0, False))
        else:
            size_classes.setdefault(span.slot.size_class.capacity, []).append(i)
    blocks = []
    for capacity in sorted(size_classes):
        members = sorted(size_classes[capacity], key=lambda i: spans[i].slot.index)
        slots = [spans[i].slot.index for i in members]
        blocks += _blocks(members, slots, [spans[i].num_new for i in members])
    return blocks + chunks


def _blocks(members: list[int], slots: list[int], sizes: list[int]) -> list[Part]:
    """One size class's members, in the order of their slots, as one block or a narrow and a wide
    one."""
    widest, best, cheapest = _width(max(sizes)), [], float("inf")
    for limit in WIDTHS[: WIDTHS.index(widest) + 1]:
        if limit < min(sizes):
            continue
        narrow = [i for i, size in enumerate(sizes) if size <= limit]
        sides = narrow, [i for i, size in enumerate(sizes) if size > limit]
        parts, total = [], 0
        for side, width in zip(sides, (limit, widest), strict=True):
            if side:
                run = (slots[side[-1]] - slots[side[0]] + 1) * (1 + width)
                copied = len(side) * (1 + width + COPY)
                total += CALL + min(run, copied)
                parts.append(Part([members[i] for i in side], width, run <= copied))
        if total < cheapest:
            best, cheapest = parts, total
    return best


def _width(size: int) -> int:
    return next(width for width in WIDTHS if width >= size)
