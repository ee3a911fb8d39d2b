"""The command line: one small function per command.

Holds true: 0 on success; 2 on bad input, with one line on stderr that says what and where; 1 if a
worker died or hangs; 130 after Ctrl-C. A defect keeps its traceback. Knows nothing of how a command
is carried out; what a command needs is imported when it is called, so that `rhymeflow --help` is
quick.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from rhymeflow import __version__
from rhymeflow.config import fields
from rhymeflow.config.load import dump_config, list_recipes, read_config, split_overrides
from rhymeflow.errors import UserError, suggestion


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        return _dispatch(list(sys.argv[1:] if arguments is None else arguments))
    except UserError as error:
        print(f"rhymeflow: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("rhymeflow: interrupted", file=sys.stderr)
        return 130


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["bench"]:
        return bench(arguments[1:])
    rest, overrides = split_overrides(arguments)
    args, unknown = _parser().parse_known_args(rest)
    configures = args.command in (train, resume, simulate, calibrate)
    if unknown or (overrides and not configures):
        option = unknown[0] if unknown else f"--{next(iter(overrides))}"
        hint = fields.nearest_field(option.lstrip("-")) if configures else ""
        raise UserError(f"{option}: there is no such argument{hint}")
    args.overrides = overrides
    result: int = args.command(args)
    return result


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every other mistake is said."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see `{self.prog} --help`)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="rhymeflow", description="Asynchronous RL post-training of language models."
    )
    parser.add_argument("--version", action="version", version=f"rhymeflow {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, command: object, **options: Any) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, allow_abbrev=False, **options)
        sub.set_defaults(command=command)
        return sub

    sub = add(
        "train",
        train,
        help="train a policy",
        usage="rhymeflow train RECIPE_OR_FILE [--dry-run] [--schedule NAME] "
        "[--section.field VALUE ...]",
        epilog="Every field of the configuration is an option, such as "
        "`--learner.max_steps 20`; `--dry-run` shows them all. `--schedule NAME` is short for "
        "`--schedule.name NAME`, `--history RUN_DIR` for `--drafting.history_run RUN_DIR`.",
    )
    sub.add_argument("recipe", metavar="RECIPE_OR_FILE", help="a recipe's name or a YAML file")
    sub.add_argument(
        "--dry-run",
        action="store_true",
        help="show the resolved configuration and what it needs, and stop",
    )
    sub = add(
        "resume",
        resume,
        help="go on with a run, however it ended",
        usage="rhymeflow resume RUN_DIR [--section.field VALUE ...]",
        epilog="Fields that have no part in what is in flight can be changed, such as "
        "`--learner.max_steps 200` for a run that is finished.",
    )
    sub.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    sub = add(
        "simulate",
        simulate,
        help="run a configuration on a simulated cluster",
        usage="rhymeflow simulate RECIPE_OR_FILE [--output DIR] [--workload RUN_DIR] "
        "[--schedule NAME] [--section.field VALUE ...]",
    )
    sub.add_argument("recipe", metavar="RECIPE_OR_FILE", help="a recipe's name or a YAML file")
    sub.add_argument("--output", metavar="DIR", type=Path, help="where the timeline goes")
    sub.add_argument(
        "--workload", metavar="RUN_DIR", type=Path, help="lengths as a real run recorded them"
    )
    sub = add(
        "calibrate",
        calibrate,
        help="measure this machine's engine and learner, and fit the cost model",
        usage="rhymeflow calibrate RECIPE_OR_FILE [--output FILE] [--section.field VALUE ...]",
    )
    sub.add_argument("recipe", metavar="RECIPE_OR_FILE", help="a recipe's name or a YAML file")
    sub.add_argument("--output", metavar="FILE", type=Path, help="where the profile goes")
    sub = add("inspect", inspect, help="show what happened in a run")
    sub.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    sub.add_argument(
        "--trajectory", metavar="G.M", help="one response in full: member M of group G"
    )
    add("recipes", recipes, help="list the ready configurations")
    add("doctor", doctor, help="what this machine can run, and what is missing")
    add("bench", bench, help="run a benchmark: `rhymeflow bench` lists them", add_help=False)
    return parser


def train(args: argparse.Namespace) -> int:
    """Train, or with `--dry-run` show what would be trained."""
    config = read_config(args.recipe, args.overrides)
    if args.dry_run:
        from rhymeflow import sizes

        needs = sizes.describe(config)
        print(dump_config(config) + needs)
        return 0
    from rhymeflow.runtime.train import train

    return _to_its_end(lambda: train(config))


def resume(args: argparse.Namespace) -> int:
    """Go on with a run."""
    from rhymeflow.runtime.train import resume

    return _to_its_end(lambda: resume(args.run_dir, args.overrides))


def _to_its_end(run: Callable[[], object]) -> int:
    from rhymeflow.runtime.supervisor import WorkerDied

    try:
        run()
    except WorkerDied as error:  # a traceback of the controller would say nothing about it
        print(f"rhymeflow: {error}", file=sys.stderr)
        return 1
    return 0


def simulate(args: argparse.Namespace) -> int:
    """Run a configuration on a simulated cluster, and plot what happened."""
    from rhymeflow.sim.simulate import simulate as run

    config = read_config(args.recipe, args.overrides)
    print(run(config, output=args.output, workload=args.workload).text())
    return 0


def calibrate(args: argparse.Namespace) -> int:
    """Measure this machine and fit the cost model to it."""
    from rhymeflow.calibration.calibrate import calibrate as run

    config = read_config(args.recipe, args.overrides)
    print(run(config, output=args.output).text())
    return 0


def inspect(args: argparse.Namespace) -> int:
    """Show a run's steps, staleness, lengths and endings, or one trajectory."""
    from rich.console import Console

    from rhymeflow.observe.inspect import inspect as show

    show(args.run_dir, args.trajectory, Console())
    return 0


def recipes(args: argparse.Namespace) -> int:
    """List the ready configurations."""
    found = list_recipes()
    width = max(map(len, found), default=0)
    for name, what in found.items():
        print(f"{name.ljust(width)}  {what}")
    return 0


def doctor(args: argparse.Namespace) -> int:
    """Say what this machine can run, what is missing and how to get it."""
    from rhymeflow import doctor as surgery

    print(surgery.examine())
    return 0


_NO_BENCHMARKS = ("harness",)
"""Modules beside the benchmarks: what they share."""


def bench(arguments: list[str]) -> int:
    """Run `benchmarks/NAME.py`; without a name, list them."""
    benchmarks = _benchmarks()
    names = sorted(
        module.name
        for module in pkgutil.iter_modules(benchmarks.__path__)
        if not module.ispkg and module.name not in _NO_BENCHMARKS
    )
    parser = _Parser(prog="rhymeflow bench", allow_abbrev=False)
    if not arguments or arguments[0].startswith("-"):
        parser.add_argument("name", nargs="?", metavar="NAME", help=", ".join(names))
        parser.parse_args(arguments)
        print(f"benchmarks: {', '.join(names)} (rhymeflow bench NAME --help)")
        return 0
    name = arguments[0]
    if name not in names:
        hint = suggestion(name, names)
        raise UserError(f"bench {name}: there is no such benchmark ({', '.join(names)}){hint}")
    module = importlib.import_module(f"benchmarks.{name}")
    parser.prog += f" {name}"
    parser.description = (module.__doc__ or "").partition("\n")[0]
    importlib.import_module("benchmarks.harness").add_common_arguments(parser)
    module.add_arguments(parser)
    module.run(parser.parse_args(arguments[1:]))
    return 0


def _benchmarks() -> ModuleType:
    """Import the benchmarks of the checkout that this package runs from."""
    root = Path(__file__).resolve().parent.parent
    if not (root / "benchmarks" / "harness.py").is_file():
        raise UserError(
            f"bench: the benchmarks are not beside the installed package ({root}); they are part "
            "of the source: clone it and install with `pip install -e .`"
        )
    sys.path.insert(0, str(root))
    return importlib.import_module("benchmarks")
