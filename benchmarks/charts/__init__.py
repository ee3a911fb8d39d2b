"""Charts that benchmarks make of their figures, as PNG; none measures anything itself."""

from benchmarks.charts.drafting import DraftingCurve, drafting_by_epoch
from benchmarks.charts.learning import Curve, reward_by_seconds
from benchmarks.charts.schedules import Bar, side_by_side
from benchmarks.charts.timelines import before_and_after

__all__ = [
    "Bar",
    "Curve",
    "DraftingCurve",
    "before_and_after",
    "drafting_by_epoch",
    "reward_by_seconds",
    "side_by_side",
]
