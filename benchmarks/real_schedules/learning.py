"""Seconds until the policy has learnt, for each schedule, and whether any favours lengths.

Runs of one recipe that differ in schedule, drafts and seed only, in turn, each worker pinned. Each
is evaluated every few versions, greedily, on the instances that also produce: so the evaluations
cost every side the same work, and dilute what a schedule wins. A run goes on until an evaluation
reaches the goal and the epochs are over that are judged for length bias (`bias.py`). All schedules
draft as the recipe says; `synchronous` and `staleflow` run once more without drafts, at the least
bound.

Seconds count from when the run is ready (`runs.py`); those from the beginning of its log, loading
included, stand beside them. Ratios are to `synchronous` with drafts and the same seed.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import harness
from benchmarks.charts import Bar, Curve, reward_by_seconds
from benchmarks.learning import kept
from benchmarks.real_schedules import bias, follow, runs
from benchmarks.real_schedules.runs import Reached, Run
from benchmarks.real_schedules.sides import BOUNDS, NAMES, Side, cores, overrides, sides
from rhymeflow.config import FIXED_BOUNDS, Config
from rhymeflow.config.load import dump_config, read_config

RECORD = "schedules-learning"
GOAL = 0.85
TARGET = 0.5
"""Seconds of `rhymeflow` over those of `synchronous`."""
REFERENCES = ("synchronous", "staleflow")
"""Run without drafts, too."""

Runs = dict[Side, list[Run]]
"""In the order of seeds."""


def add_arguments(parser: Any) -> None:
    """Add this part's options."""
    parser.add_argument(
        "--seeds", type=harness.positive, default=3, help="runs of each side (default 3)"
    )
    parser.add_argument(
        "--goal", type=harness.share, default=GOAL, help="held-out reward (default 0.85)"
    )
    parser.add_argument(
        "--eval-steps", type=harness.positive, default=2, help="between evaluations (default 2)"
    )
    parser.add_argument(
        "--epochs",
        type=harness.positive,
        default=2,
        help="that length bias is judged on (default 2)",
    )
    parser.add_argument(
        "--max-steps", type=harness.positive, default=96, help="without the goal (default 96)"
    )
    parser.add_argument(
        "--runs", type=Path, metavar="DIR", help="keep runs here, and go on with those that are"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Make the runs that are missing, and report."""
    chosen = sides_of(args)
    seen: Runs = {side: [] for side in chosen}
    with tempfile.TemporaryDirectory(prefix="rhymeflow-schedules-") as temporary:
        folder = args.runs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        measures = {
            str(side): functools.partial(measure, side, args, folder, seen[side]) for side in chosen
        }
        harness.interleave(measures, args.seeds)
    rows = table(seen, args)
    result = harness.report(RECORD, rows, targets(seen, args), args, notes=notes(args))
    if args.record:
        record_curves(seen)
        draw(harness.RESULTS / f"{RECORD}.png", seen, args.goal)
    return result


def sides_of(args: argparse.Namespace) -> list[Side]:
    """Every schedule at its bounds, and the references without drafts at the least of them."""
    names = args.schedule or NAMES
    bounds = args.bound or BOUNDS
    bare = sides([name for name in names if name in REFERENCES], [min(bounds)])
    return sides(names, bounds) + [side._replace(has_drafts=False) for side in bare]


def measure(side: Side, args: argparse.Namespace, folder: Path, seen: list[Run]) -> float:
    """Make the next seed's run, or take it as it was kept; return its seconds to the goal."""
    drafts = "" if side.has_drafts else "-bare"
    run_dir = folder / f"{side.schedule}-{side.bound}{drafts}-{len(seen)}"
    fields = fields_of(side, args, seed=len(seen))
    found = kept.load(run_dir, fields, Run)
    if found is None:
        found = train(run_dir, fields, args)
        kept.keep(run_dir, fields, found)
    assert found.staleness <= side.bound, f"{side}: staleness {found.staleness}"
    seen.append(found)
    return runs.reached(found, args.goal).seconds


def fields_of(side: Side, args: argparse.Namespace, seed: int) -> dict[str, str]:
    """What makes this run differ from the recipe."""
    return {
        **overrides(side, args.instances),
        "learner.max_steps": str(max(args.max_steps, least_steps(load(args.recipe), args))),
        "run.eval_steps": str(args.eval_steps),
        "run.report_to": "[]",
        "run.seed": str(seed),
    }


def load(recipe: str, fields: Mapping[str, str] | None = None) -> Config:
    """The recipe with these fields."""
    return read_config(recipe, dict(fields or {}))


def least_steps(config: Config, args: argparse.Namespace) -> int:
    """The epochs that length bias is judged on, and what may be behind."""
    assert config.data.size is not None, f"{args.recipe} has no epochs"
    epoch = -(-config.data.size // config.learner.groups_per_batch)
    return args.epochs * epoch + max(args.bound or BOUNDS) + 2


def train(run_dir: Path, fields: Mapping[str, str], args: argparse.Namespace) -> Run:
    """Make a run, in place of what an interrupted one left, and read it."""
    if run_dir.exists():
        shutil.rmtree(run_dir)
    config = load(args.recipe, {**fields, "run.output_dir": str(run_dir.resolve())})
    path = run_dir.with_name(f"{run_dir.name}.yaml")
    path.write_text(dump_config(config), encoding="utf-8")
    least = least_steps(config, args)

    def is_enough(rows: follow.Rows) -> bool:
        steps = max((step for step, row in rows.items() if "reward" in row), default=0)
        rewards = [row["eval/reward"] for row in rows.values() if "eval/reward" in row]
        return steps >= least and max(rewards, default=0.0) >= args.goal

    follow.train(path, run_dir, is_enough)
    surplus = config.schedule.extra_generations
    return runs.read(run_dir, config.rollout.num_generations + surplus)


# -- report ----------------------------------------------------------------------------------------


def table(seen: Runs, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each side."""
    baseline = baseline_of(seen)
    counts = {side: counted(found, seen, args) for side, found in seen.items()} if baseline else {}
    rows = []
    for side, found in seen.items():
        goals = [runs.reached(run, args.goal) for run in found]
        row = time_row(side, found, goals)
        if baseline is not None:
            row |= ratio_row(ratios(goals, [runs.reached(r, args.goal) for r in seen[baseline]]))
            row |= bias_row(counts[side], counts[baseline])
        rows.append({**row, **order_row(found, args.epochs)})
    return rows


def time_row(side: Side, found: Sequence[Run], goals: Sequence[Reached]) -> dict[str, Any]:
    """Medians over seeds; a run that ended before the goal counts with all its time."""
    seconds = [goal.seconds for goal in goals]
    return {
        "schedule": side.schedule,
        "bound": side.bound,
        "drafts": side.has_drafts,
        "reached": f"{sum(goal.is_goal for goal in goals)} of {len(goals)}",
        "seconds": round(statistics.median(seconds), 2),
        "least": round(min(seconds), 2),
        "greatest": round(max(seconds), 2),
        "from start": round(statistics.median(goal.from_start for goal in goals), 2),
        "published": round(statistics.median(goal.published for goal in goals), 2),
        "steps to it": statistics.median(goal.steps for goal in goals),
        "steps/s": round(statistics.median(map(runs.steps_per_second, found)), 3),
        "greatest staleness": max(run.staleness for run in found),
    }


def ratios(ours: Sequence[Reached], theirs: Sequence[Reached]) -> list[float]:
    """Seconds over those of the other side, seed by seed."""
    return [a.seconds / b.seconds for a, b in zip(ours, theirs, strict=True)]


def ratio_row(found: Sequence[float]) -> dict[str, Any]:
    """The ratio to `synchronous`: median and range over seeds."""
    return {
        "ratio": round(statistics.median(found), 3),
        "ratio, least": round(min(found), 3),
        "ratio, greatest": round(max(found), 3),
    }


def baseline_of(seen: Runs) -> Side | None:
    """`synchronous` with drafts, if it was run."""
    return next((side for side in seen if side.schedule == "synchronous" and side.has_drafts), None)


def counted(found: Sequence[Run], seen: Runs, args: argparse.Namespace) -> dict[bias.Key, Any]:
    """Endings by class."""
    baseline = baseline_of(seen)
    assert baseline is not None
    return bias.count(found, seen[baseline], args.epochs)


def bias_row(ours: Mapping[bias.Key, Any], theirs: Mapping[bias.Key, Any]) -> dict[str, Any]:
    """Shares of each ending that there is, from the shortest fifth to the longest."""
    shares = bias.shares(ours)
    row = {
        f"{ending}, by fifth": " ".join(f"{share:.3f}" for share in shares[:, at])
        for at, ending in enumerate(bias.ENDINGS)
        if ending == "consumed" or shares[:, at].any()
    }
    return {**row, "endings differ, standard errors": round(furthest(ours, theirs), 2)}


def order_row(found: Sequence[Run], num_epochs: int) -> dict[str, Any]:
    """How far the order of training is from that of drawing, and whether by length."""
    deviation = bias.order(found, num_epochs)
    late = bias.delays(found, num_epochs)
    return {
        "groups out of order": round(bias.out_of_order(found, num_epochs), 3),
        "consumed less drawn, tokens": round(deviation.value, 3),
        "its standard error": round(deviation.error, 3),
        "delay by fifth, steps": " ".join(f"{each:.2f}" for each in late),
    }


def furthest(ours: Mapping[bias.Key, Any], theirs: Mapping[bias.Key, Any]) -> float:
    """The largest deviation of endings."""
    return max(each.errors for row in bias.endings(ours, theirs) for each in row)


def targets(seen: Runs, args: argparse.Namespace) -> list[harness.Target]:
    """`rhymeflow`'s time against `synchronous`', and every schedule's length bias."""
    baseline = baseline_of(seen)
    if baseline is None:
        return []
    theirs = [runs.reached(run, args.goal) for run in seen[baseline]]
    found = []
    others = [side for side in seen if side.schedule != "synchronous"]
    for side in others:
        if side.schedule == "rhymeflow":
            goals = [runs.reached(run, args.goal) for run in seen[side]]
            missed = sum(not goal.is_goal for goal in [*goals, *theirs])
            name = f"learning/{side}/synchronous" + (f", {missed} not reached" if missed else "")
            found.append(
                harness.Target(name, statistics.median(ratios(goals, theirs)), TARGET, at_most=True)
            )
    if not others:
        return found
    counts = counted(seen[baseline], seen, args)
    cells = bias.NUM_CLASSES * len(bias.ENDINGS) * len(others)
    ends = {side: furthest(counted(seen[side], seen, args), counts) for side in others}
    orders = {side: bias.order(seen[side], args.epochs).errors for side in others}
    for name, errors, limit in (
        ("endings by length", ends, bias.limit(cells)),
        ("order by length", orders, bias.limit(len(others))),
    ):
        worst = max(errors, key=lambda side: errors[side])
        title = f"learning/{name}, standard errors, most of all ({worst})"
        found.append(harness.Target(title, errors[worst], round(limit, 2), at_most=True))
    return found


def notes(args: argparse.Namespace) -> str:
    """How it was measured."""
    learner, instances = cores(args.instances)
    return (
        f"{args.recipe}, {args.instances} rollout instances, {args.seeds} seeds, runs in turn, "
        f"medians. Cores: learner {learner}, instances {instances}, one thread each. `seconds`: "
        "from when the run is ready (a version published, an instance joined) to the first "
        f"greedy evaluation, of one every {args.eval_steps} versions, whose held-out reward is "
        f"{args.goal:g} or more; `from start` includes loading; `published`: to the publication "
        "of that version. A run that ended before counts with all its time. Ratios are to "
        "`synchronous` with the same seed. Length bias is judged on the first "
        f"{args.epochs} epochs: fifths are by the length of the same response in `synchronous`, "
        "shortest first; `consumed less drawn` is how much longer the responses trained on by a "
        "step are than those drawn by then; `delay`: steps later than in order, by fifth of "
        "length (benchmarks/real_schedules/bias.py). All curves: schedules-learning-runs.jsonl."
    )


def bars(rows: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """What `charts.side_by_side` shows of a record's rows: how many times sooner, with drafts.

    A panel for each bound; schedules that have one of their own stand in all of them.
    """
    shown = [row for row in rows if "ratio" in row and row["drafts"]]
    bounds = {row["bound"] for row in shown if row["schedule"] not in FIXED_BOUNDS}
    return [
        Bar(
            panel=f"real, bound {bound}: time to a reward",
            schedule=row["schedule"],
            value=1 / row["ratio"],
            least=1 / row["ratio, greatest"],
            greatest=1 / row["ratio, least"],
        )
        for bound in sorted(bounds)
        for row in shown
        if row["schedule"] in FIXED_BOUNDS or row["bound"] == bound
    ]


def curves(seen: Runs) -> list[Curve]:
    """Every run's held-out reward against seconds since it was ready."""
    return [
        Curve(
            side=str(side),
            schedule=side.schedule,
            bound=side.bound,
            has_drafts=side.has_drafts,
            seed=seed,
            points=[
                (round(each.seconds - run.ready, 3), each.version, round(each.reward, 5))
                for each in run.evaluations
            ],
        )
        for side, found in seen.items()
        for seed, run in enumerate(found)
    ]


def record_curves(seen: Runs) -> None:
    """Record what the picture is drawn from, and the versions' times, beside the report."""
    published = [run.published for found in seen.values() for run in found]
    readies = [run.ready for found in seen.values() for run in found]
    lines = [
        {
            **msgspec.to_builtins(curve),
            "ready": round(ready, 3),
            "published": [round(seconds - ready, 3) for seconds in times],
        }
        for curve, ready, times in zip(curves(seen), readies, published, strict=True)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (harness.RESULTS / f"{RECORD}-runs.jsonl").write_text(text, encoding="utf-8")


def draw(path: Path, seen: Runs, goal: float) -> None:
    """Draw all curves."""
    seconds = {
        str(side): statistics.median(runs.reached(run, goal).seconds for run in found)
        for side, found in seen.items()
    }
    reward_by_seconds(curves(seen), seconds, goal, path)
