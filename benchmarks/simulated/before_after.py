"""The timelines of a few steps before and after: synchronous without drafts, rhymeflow with them.

Both do the same steps on the same devices, few enough that rows can be told apart, and have their
history behind them. Each stands at its best split.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.charts import before_and_after
from benchmarks.charts.timelines import part
from benchmarks.simulated import splits
from benchmarks.simulated.cells import EPOCH, OURS, Cell, case
from rhymeflow.sim.simulate import run as simulate
from rhymeflow.sim.timeline import Timeline
from rhymeflow.sim.workload import workload

PICTURE = "timeline-before-after.png"
BEFORE = Cell("14b", 32, 2048, "long", "informative", False, "synchronous", 0)
AFTER = BEFORE._replace(drafts=True, schedule=OURS, bound=3)
LABELS = (
    "synchronous, no drafts; all devices roll out, then all train",
    "rhymeflow, drafts; some devices roll out while others train",
)
FIRST, COUNT = EPOCH + 2, 4
"""Steps shown: all prompts were answered before, and what runs ahead does so as always."""


def draw(path: Path) -> None:
    """Simulate both and write the PNG."""
    found = [part(timeline(cell), FIRST, COUNT) for cell in (BEFORE, AFTER)]
    before_and_after(found[0], found[1], path, LABELS)


def timeline(cell: Cell) -> Timeline:
    """Of a run of this cell, at its best split."""
    one = case(cell, FIRST + COUNT)
    found = Timeline()
    rollout = None if one.colocated else splits.best_split(one)["rollout devices"]
    config = splits.configure(one, rollout)
    simulate(config, workload(config, None), timeline=found)
    return found


def main() -> None:
    """`python -m benchmarks.simulated.before_after PATH`: the picture alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    draw(parser.parse_args().path)


if __name__ == "__main__":
    main()
