"""How the charts look: quiet axes, one colour a schedule, a title that says what is to be seen."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

WIDTH = 9.0
"""Inches; at `DPI` a README's width."""
DPI = 110
INK, FAINT = "#33333d", "#bbbbbb"

COLOURS = {
    "synchronous": "#33333d",
    "one_step": "#9a9aa8",
    "bounded": "#8d6bb0",
    "partial": "#b0763b",
    "staleflow": "#2a7fb8",
    "histopipe": "#6a994e",
    "rhymeflow": "#d1495b",
}
"""Of each schedule, in every chart."""


def figure(height: float, title: str) -> Figure:
    """An empty figure of README width, so many inches high."""
    made = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(made)
    made.suptitle(title, x=0.01, ha="left", fontsize=12, color=INK)
    return made


def quiet(axes: Axes, *hidden: str) -> None:
    """Leave out what is not read: the upper and right frame, and these sides."""
    axes.spines[["top", "right", *hidden]].set_visible(False)
    axes.spines[:].set_color(FAINT)
    axes.tick_params(colors=INK, color=FAINT, labelsize=9)


def save(made: Figure, path: Path) -> None:
    """Write the PNG."""
    made.savefig(path, dpi=DPI)
