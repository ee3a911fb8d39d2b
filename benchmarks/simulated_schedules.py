"""Every schedule on the same simulated workloads: tails, bounds, drafts, true and useless history.

Reached by `rhymeflow bench schedules --simulated`; its record is `schedules-simulated`. The setting
is the one StaleFlow was measured in, with what is assumed of it in benchmarks/staleflow.py (128
groups of 16, prompts of 2,048 tokens, responses of up to 20,480 with a mean of 5,000, H20s), but
for the epochs: one is four steps here, so that from the fifth step on every prompt was answered
before. Fixed before anything was run:

- the first epoch is not counted, nor are the last three steps, ahead of which nothing runs;
- long tail: sigma 0.99; short tail: sigma 0.5, the same mean;
- history is informative (65% of the variance of lengths is the prompt's, whose level keeps a
  correlation of 0.98 from epoch to epoch), shuffled (a correlation of 0: an epoch says nothing
  about the next) or none (the prompt explains nothing);
- with drafts, they are accepted as `simulation.acceptance` says, whatever is known of lengths;
- at a bound of 0 all devices take turns, as for `synchronous`; else each schedule has the split,
  in sixteenths, where it is fastest (benchmarks/simulated/splits.py);
- the coordinator plans once a second;
- `synchronous` is what was published of it: without drafts. `over synchronous, drafts` has them.

The published setting names 2,048 as the limit of a prompt. The prompts of DAPO-Math, the dataset it
names, are mostly short, and what a step costs in prompts depends on their length; so prompts of 256
tokens stand beside those of 2,048, in some cells of the default and in all of `--full`. The
greatest ratio to `synchronous` is sought over both.

The default finishes in less than ten minutes on two quiet cores: all schedules in one place, in the
others `rhymeflow` and the two it is compared with (benchmarks/simulated/cells.py).

Ratios are of trained tokens per second. `at most` is the ratio to `synchronous` that a schedule
would have for which rollout took nothing and all devices trained all the time. `over staleflow` is
at the same bound, both with drafts or both without, and `over histopipe` is at any bound above 0,
that of `histopipe` being 1.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import harness
from benchmarks.charts import Bar
from benchmarks.simulated import before_after, splits
from benchmarks.simulated.cells import EPOCH, MODELS, OURS, Cell, baselines, case, cells, rivals

RECORD = "schedules-simulated"

SHOWN = (
    "rollout devices",
    "tokens/s",
    "idle rollout",
    "idle learner",
    "idle devices",
    "interrupted",
    "mean staleness",
    "greatest staleness",
    "wasted",
)


def add_arguments(parser: Any) -> None:
    """Add this side's options; `--schedule` and `--bound` are those of all."""
    parser.add_argument("--full", action="store_true", help="all models and workloads; a day")
    parser.add_argument("--model", choices=list(MODELS), action="append", help="of these only")
    parser.add_argument("--devices", type=harness.positive, action="append", help="so many only")
    parser.add_argument(
        "--simulated-steps",
        type=harness.positive,
        default=12,
        help="the first four are not counted",
    )
    parser.add_argument("--jobs", type=harness.positive, default=2, help="cases at a time")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Find every cell's figures and report."""
    shown = list(cells(args))
    wanted = dict.fromkeys([*shown, *(base for cell in shown for base in baselines(cell))])
    cases = {cell: case(cell, args.simulated_steps) for cell in wanted}
    measured = splits.best(list(cases.values()), args.jobs)
    found = {cell: measured[one] for cell, one in cases.items()}
    rows = [row(cell, found) for cell in wanted]
    name = f"{RECORD}-full" if args.full else RECORD
    result = harness.report(name, rows, targets(rows), args, notes=notes(args, rows))
    if args.record:
        before_after.draw(harness.RESULTS / before_after.PICTURE)
    return result


def row(cell: Cell, found: Mapping[Cell, splits.Figures]) -> dict[str, Any]:
    """A table row, with the ratios to what it is compared with."""
    rate = found[cell]["tokens/s"]
    in_turn = found[cell.other("synchronous", False)]
    ratios = {
        "over synchronous": rate / in_turn["tokens/s"],
        "at most": 1 / (1 - in_turn["idle learner"]),
        "over synchronous, drafts": rate / found[cell.other("synchronous", True)]["tokens/s"],
        **{f"over {other.schedule}": rate / found[other]["tokens/s"] for other in rivals(cell)},
    }
    return {
        **cell._asdict(),
        **splits.shown(found[cell], *SHOWN),
        **{name: round(ratio, 4) for name, ratio in ratios.items()},
    }


def over_better(one: Mapping[str, Any]) -> float:
    """A row's ratio to the better of `staleflow` and `histopipe`."""
    return float(min(one[f"over {name}"] for name in ("staleflow", "histopipe")))


def contested(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of `rhymeflow` where both rivals are there, with drafts and informative history."""
    return [
        r
        for r in rows
        if r["schedule"] == OURS
        and r["bound"] > 0
        and r["drafts"]
        and r["history"] == "informative"
    ]


def targets(rows: Sequence[Mapping[str, Any]]) -> list[harness.Target]:
    """The targets of `rhymeflow`; those for which the rows are not there are left out."""
    ours = [r for r in rows if r["schedule"] == OURS]
    published = [r for r in ours if r["tail"] == "long" and r["history"] == "informative"]
    least = [r[name] for r in ours for name in ("over staleflow", "over histopipe") if name in r]
    useless = [r["over staleflow"] for r in ours if r["history"] != "informative"]
    both = [over_better(r) for r in contested(rows)]
    found = []
    if published:
        most = max(r["over synchronous"] for r in published)
        found.append(harness.Target("rhymeflow/synchronous without drafts, greatest", most, 3.0))
    if both:
        mean = statistics.mean(both)
        found.append(harness.Target("rhymeflow/best of staleflow and histopipe, mean", mean, 1.15))
    if least:
        found.append(harness.Target("rhymeflow/either, least of all cells", min(least), 0.97))
    if useless:
        name = "rhymeflow/staleflow, useless history, least"
        found.append(harness.Target(name, min(useless), 0.97))
    return found


def notes(args: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> str:
    """What the figures are, and how far the contested cells are apart."""
    both = [over_better(r) for r in contested(rows)]
    spread = (
        f"With drafts and informative history, over the better of staleflow and histopipe: "
        f"{min(both):.3f} to {max(both):.3f} in {len(both)} cells. "
        if both
        else ""
    )
    return (
        f"Simulated, {args.simulated_steps} steps, of which the first {EPOCH} are not counted. "
        f"{spread}Each figure is at the split (rollout devices of all) where the schedule is "
        "fastest. What is assumed stands "
        "in benchmarks/simulated_schedules.py."
    )


def bars(rows: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """What `charts.side_by_side` shows of a record's rows: schedules with drafts, the long tail.

    Of each the bound where it is fastest, in the two places where most schedules were run.
    """
    compared = [
        r for r in rows if r["drafts"] and (r["tail"], r["history"]) == ("long", "informative")
    ]
    most: dict[tuple[Any, ...], dict[str, float]] = {}
    for each in compared:
        place = most.setdefault((each["model"], each["devices"], each["prompt"]), {})
        ratio = each["over synchronous, drafts"]
        place[each["schedule"]] = max(ratio, place.get(each["schedule"], 0.0))
    shown = sorted(most.items(), key=lambda place: -len(place[1]))[:2]
    return [
        Bar(f"simulated, {model} on {devices}: rate", name, ratio)
        for (model, devices, _), place in shown
        for name, ratio in place.items()
    ]
