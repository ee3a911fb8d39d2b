"""The timelines of a few steps before and after: synchronous without drafts, rhymeflow with them.

Both do the same steps on the same devices, and have their history behind them. Each stands at its
best split. It is a quarter of a place in benchmarks/simulated/cells.py, devices and batch alike, so
that an instance has as much to do and rows can be told apart.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.charts import before_and_after
from benchmarks.charts.timelines import part
from benchmarks.simulated import splits
from benchmarks.simulated.cells import BATCH, EPOCH, OURS, Cell, case
from rhymeflow.sim.simulate import run as simulate
from rhymeflow.sim.timeline import Timeline
from rhymeflow.sim.workload import workload

PICTURE = "timeline-before-after.png"
BEFORE = Cell("30b-a3b", 32, 2048, "long", "informative", False, "synchronous", 0)
AFTER = BEFORE._replace(drafts=True, schedule=OURS, bound=3)
LABELS = (
    "synchronous, no drafts; all devices roll out, then all train (instances idle)",
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
    one = a_quarter(case(cell, FIRST + COUNT))
    found = Timeline()
    rollout = None if one.colocated else splits.best_split(one)["rollout devices"]
    config = splits.configure(one, rollout)
    simulate(config, workload(config, None), timeline=found)
    return found


def a_quarter(one: splits.Case) -> splits.Case:
    """The case with a quarter of the batch; its devices are a quarter already."""
    settings = {
        **dict(one.settings),
        "learner.groups_per_batch": str(BATCH // 4),
        "simulation.workload.num_prompts": str(BATCH // 4 * EPOCH),
    }
    return one._replace(settings=tuple(sorted(settings.items())))


def main() -> None:
    """`python -m benchmarks.simulated.before_after PATH`: the picture alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    draw(parser.parse_args().path)


if __name__ == "__main__":
    main()
