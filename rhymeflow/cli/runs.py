"""The commands that only read runs: `inspect`, `dashboard`, `runs`, `plot`, `export`.

Adding them does not import the configuration, which is slow."""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path

from rhymeflow.cli.parser import Add, as_number, positive, whole
from rhymeflow.errors import UserError

_EXPORT = """Writes what a run generated, also during the run (docs/inspecting.md):
rows with everything that is stored, rows for `rhymeflow sft`, or preference pairs."""
_PLOT = """Runs that differ only in run.seed are one line: their mean, with a band of one
standard deviation to either side."""

NAMES = ("inspect", "dashboard", "runs", "plot", "export")


def add_commands(add: Add) -> None:
    """Add the commands with their arguments."""
    _add_looking(add)
    _add_plot(add)
    _add_export(add)


def _add_looking(add: Add) -> None:
    sub = add("inspect", inspect, help="show what happened in a run")
    sub.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    what = "one response in full: member M of group G"
    sub.add_argument("--trajectory", metavar="G.M", help=what)
    for kind in ("worst", "best"):
        which = f"the N responses with the {kind} rewards (5 if no number is given)"
        sub.add_argument(f"--{kind}", metavar="N", type=int, nargs="?", const=5, help=which)
    what = "step S: its metrics and groups; with --best, --worst: only of step S"
    sub.add_argument("--step", metavar="S", type=whole, help=what)
    what = "group G: its prompt and its responses"
    sub.add_argument("--group", metavar="G", type=_group, help=what)
    sub.add_argument("--json", action="store_true", help="the same as JSON (docs/inspecting.md)")
    sub = add("dashboard", dashboard, help="serve pages over runs, live and finished")
    what = "the newest of `runs` if none is given"
    sub.add_argument("run_dirs", metavar="RUN_DIR", type=Path, nargs="*", help=what)
    what = "address to listen on; the default serves this machine only"
    sub.add_argument("--host", default="127.0.0.1", help=what)
    sub.add_argument(
        "--port", metavar="N", type=_port, help="default: the first free one from 8750 on"
    )
    sub = add("runs", runs, help="list runs with their results")
    what = "directory with runs (default: runs)"
    sub.add_argument("directories", metavar="DIR", type=Path, nargs="*", help=what)
    sub.add_argument("--json", action="store_true", help="the same as JSON")


def _add_plot(add: Add) -> None:
    sub = add("plot", plot, help="draw curves of runs", epilog=_PLOT)
    sub.add_argument("run_dirs", metavar="RUN_DIR", type=Path, nargs="+")
    where = Path("curves.png")
    sub.add_argument("--output", metavar="FILE", type=Path, default=where, help=".png or .svg")
    what = "a name in metrics.jsonl, or steps/s; may be given several times"
    sub.add_argument("--metric", metavar="NAME", action="append", default=[], help=what)
    sub.add_argument("--x", choices=("step", "time", "trajectories"), default="step")
    what = "each point is the mean of the last N; evaluations are not smoothed"
    sub.add_argument("--smooth", metavar="N", type=positive, default=1, help=what)


def _add_export(add: Add) -> None:
    sub = add("export", export, help="write what a run generated to a file", description=_EXPORT)
    sub.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    sub.add_argument("--output", metavar="PATH", type=Path, required=True)
    kinds = ("jsonl", "parquet", "datasets")
    what = "default: by the suffix of PATH; datasets is a directory for load_from_disk"
    sub.add_argument("--format", choices=kinds, help=what)
    rows = ("trajectories", "sft", "preferences")
    sub.add_argument("--what", choices=rows, default="trajectories")
    sub.add_argument("--tokens", action="store_true", help="with trajectories: every token too")
    sub.add_argument("--force", action="store_true", help="replace what is at PATH")
    sub.add_argument(
        "--min-reward", metavar="R", type=_number, help="only with this reward or more"
    )
    steps = "only trained on in steps A to B (inclusive); A: and :B are open"
    sub.add_argument("--steps", metavar="A:B", type=_steps, help=steps)
    endings = ("consumed", "filtered", "aborted", "unfinished")
    what = "only with this ending; may be given several times"
    sub.add_argument("--ending", choices=endings, action="append", default=[], help=what)
    sub.add_argument("--best", metavar="N", type=positive, help="only the N best of each prompt")
    what = "of a run that trained an adapter, or of one: the model with it, to the directory PATH"
    sub.add_argument("--merged", action="store_true", help=what)


def inspect(args: argparse.Namespace) -> None:
    """Show a run's results and progress, or some of its responses."""
    from rich.console import Console

    from rhymeflow.observe import inspect as inspected

    names = ("trajectory", "group", "best", "worst", "step")
    question = inspected.Question(**{name: getattr(args, name) for name in names})
    if args.json:
        print(inspected.as_json(args.run_dir, question))
    else:
        inspected.inspect(args.run_dir, question, Console())


def dashboard(args: argparse.Namespace) -> None:
    """Serve pages over runs until Ctrl-C."""
    from rhymeflow.dashboard.serve import serve

    serve(args.run_dirs, host=args.host, port=args.port)


def runs(args: argparse.Namespace) -> None:
    """List runs."""
    from rich.console import Console

    from rhymeflow.observe import runs as listing

    if args.json:
        print(json.dumps(listing.as_json(args.directories), indent=2))
    else:
        listing.show(args.directories, Console())


def plot(args: argparse.Namespace) -> None:
    """Draw curves of runs; print the path of the picture."""
    from rhymeflow.observe.plot import plot as draw  # loads matplotlib

    draw(args.run_dirs, args.output, names=args.metric, axis=args.x, smooth=args.smooth)
    print(args.output)


def export(args: argparse.Namespace) -> None:
    """Write what a run generated, and print how much it was; or the model with its adapter."""
    if args.merged:
        _export_merged(args)
        return
    from rhymeflow.export.export import Filters
    from rhymeflow.export.export import export as write

    filters = Filters(args.min_reward, args.steps, tuple(args.ending), args.best)
    done = write(
        args.run_dir,
        args.output,
        what=args.what,
        kind=args.format,
        filters=filters,
        with_tokens=args.tokens,
        force=args.force,
    )
    print(done.line())


def _export_merged(args: argparse.Namespace) -> None:
    names = ("format", "tokens", "force", "min_reward", "steps", "ending", "best")
    given = [name for name in names if getattr(args, name)]
    if args.what != "trajectories":
        given.append("what")
    if given:
        raise UserError(f"--{given[0].replace('_', '-')}: not with --merged, which writes a model")
    from rhymeflow.export.merged import write_merged  # loads torch

    adapter = write_merged(args.run_dir, args.output)
    print(f"{args.output}: the model with the adapter of {adapter}")


def _group(text: str) -> int:
    """Parse a group number; groups of suites have negative ones."""
    return -whole(text[1:]) if text.startswith("-") else whole(text)


def _port(text: str) -> int:
    number = positive(text)
    if number > 65_535:
        raise argparse.ArgumentTypeError(f"given {text!r}, ports go to 65535")
    return number


def _number(text: str) -> float:
    value = as_number(text)
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"given {text!r}, should be a number")
    return value


def _steps(text: str) -> tuple[float, float]:
    match = re.fullmatch(r"(\d*):(\d*)", text)
    first, last = (int(match[1] or 1), int(match[2] or 0) or math.inf) if match else (1, 0)
    if not 1 <= first <= last:
        raise argparse.ArgumentTypeError(f"given {text!r}, should be A:B, steps from 1 on")
    return first, last
