"""Draws what drafting comes to as history grows: by epoch, with drafts and without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from benchmarks.charts import style


class DraftingCurve(msgspec.Struct, frozen=True):
    """One side of the runs; each list has an entry an epoch."""

    label: str
    tokens_per_step: list[float]
    """Tokens of a sequence that an iteration makes; 1 without drafts."""
    accepted: list[float]
    """Share of drafted tokens; empty without drafts."""
    tokens_per_s: list[float]
    """Response tokens per second of the time in which the instances decoded."""


def drafting_by_epoch(curves: Sequence[DraftingCurve], path: Path) -> None:
    """Write the PNG; the last side is the one that drafts, the others are grey."""
    made = style.figure(3.3, _title(curves))
    steps, accepted, rate = made.subplots(1, 3)
    for curve in curves:
        is_ours = curve is curves[-1]
        colour = style.COLOURS["rhymeflow"] if is_ours else style.COLOURS["one_step"]
        _line(steps, curve.tokens_per_step, curve.label, colour)
        _line(accepted, curve.accepted, curve.label, colour)
        _line(rate, [each / 1000 for each in curve.tokens_per_s], curve.label, colour)
    for axes, title, unit in (
        (steps, "tokens per iteration", "tokens, of one response"),
        (accepted, "drafted tokens accepted", "share"),
        (rate, "rollout speed", "thousand tokens/s"),
    ):
        axes.set_title(title, fontsize=10, loc="left", color=style.INK)
        axes.set_ylabel(unit, fontsize=9)
        axes.set_xlabel("epoch", fontsize=9)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        style.quiet(axes)
    accepted.set_ylim(0, 1)
    accepted.yaxis.set_major_formatter(PercentFormatter(1))
    rate.legend(frameon=False, fontsize=9, loc="lower right")
    style.save(made, path)


def _line(axes: Axes, values: Sequence[float], label: str, colour: str) -> None:
    epochs = range(1, len(values) + 1)
    axes.plot(epochs, values, color=colour, marker="o", markersize=4, linewidth=1.8, label=label)


def _title(curves: Sequence[DraftingCurve]) -> str:
    base, ours = curves[0], curves[-1]
    gain = ours.tokens_per_s[-1] / base.tokens_per_s[-1]
    return (
        f"Once history has the prompts, an iteration makes {ours.tokens_per_step[-1]:.1f} tokens, "
        f"and rollouts run at {gain:.1f} times the speed"
    )
