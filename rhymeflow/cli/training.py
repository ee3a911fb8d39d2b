"""The commands that make a policy: `train`, `resume`, `simulate`, `calibrate`, `sft`.

A mistake in the configuration is said before what takes long to import is imported.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rhymeflow.cli.parser import Add
from rhymeflow.config import Config
from rhymeflow.config import help as pages
from rhymeflow.config.load import SHORT, read_config

_TRAIN = """\
Trains a policy: a recipe (`rhymeflow recipes` lists them), a YAML file, or a
task of your own:

  rhymeflow train --model DIR_OR_HUB_NAME --data FILE --reward FILE.py:FUNCTION
"""


_SFT = """\
Fine-tunes a model on rows that say what is right (docs/sft.md), in one process:

  rhymeflow sft --model DIR_OR_HUB_NAME --data FILE --sft.output_dir DIR

A row is {prompt, completion}, or {messages}. DIR is then a model to train on.
"""

_SHORT = {
    "model": ("M", "a local directory or a hub name"),
    "data": ("FILE", "CSV, JSON, JSONL or Parquet; text also compressed"),
    "reward": ("F", "file.py:function, or a built-in; several are added up"),
    "schedule": ("NAME", "how rollout and training overlap"),
    "history": ("RUN_DIR", "a run to draft from"),
}

_CALIBRATE = "Routing weighs with it (--schedule.cost_model FILE.json), and `simulate` runs on it."


def add_commands(add: Add) -> None:
    """Add the commands with their arguments."""
    _add_train(add)
    _add_resume(add)
    _add_simulated(add)
    sub = add_configured(
        add, "sft", sft, help="supervised fine-tuning: a checkpoint to begin from", description=_SFT
    )
    what = "read all rows, show the first as it is learnt and the whole configuration, and stop"
    sub.add_argument("--dry-run", action="store_true", help=what)


def add_configured(
    add: Add, name: str, command: object, first: str | None = None, **options: Any
) -> argparse.ArgumentParser:
    """Add a command that takes a recipe or a file, and fields; `first`: what comes before them."""
    sub = add(
        name, command, takes_fields=True, formatter_class=pages.Page, add_help=False, **options
    )
    needs = "RECIPE_OR_FILE" if name == "simulate" else "[RECIPE_OR_FILE]"
    if first is not None:
        what = "a checkpoint, a run directory, a directory, a hub name or recipe:NAME"
        sub.add_argument(first.lower(), metavar=first, help=what)
        needs = f"{first} {needs}"
    break_at = "" if first is None else "\n" + " " * len(f"usage: rhymeflow {name}")
    sub.usage = f"rhymeflow {name} {needs} [OPTION ...]{break_at} [--section.field VALUE ...]"
    sub.add_argument(
        "recipe",
        nargs=None if name == "simulate" else "?",
        metavar="RECIPE_OR_FILE",
        help="a recipe's name or a YAML file",
    )
    sub.add_argument(
        *("-h", "--help"),
        nargs="?",
        const="common",
        action=pages.Help,
        metavar="WHAT",
        help="this page; --help=all has every field, --help=SECTION those of a section",
    )
    return sub


def _add_train(add: Add) -> None:
    sub = add_configured(add, "train", train, help="train a policy", description=_TRAIN)
    sub.add_argument(
        "--dry-run",
        nargs="?",
        const="full",
        choices=("full", "plan"),
        metavar="plan",
        dest="dry_run",
        help="load all but the weights, show the whole configuration and what it needs, and stop; "
        "=plan loads nothing: sizes, memory and placement only",
    )
    for option, (metavar, what) in _SHORT.items():
        sub.add_argument(f"--{option}", metavar=metavar, help=f"{what} ({SHORT[option]})")
    what = "serve pages over the run while it goes on, and print their address"
    sub.add_argument("--dashboard", action="store_true", help=what)


def _add_resume(add: Add) -> None:
    sub = add(
        "resume",
        resume,
        takes_fields=True,
        help="go on with a run, however it ended",
        usage="rhymeflow resume RUN_DIR [--section.field VALUE ...]\n"
        "       rhymeflow resume BACKUP [--output_dir DIR] [--section.field VALUE ...]",
        epilog="Fields that have no part in what is in flight can be changed, such as "
        "`--learner.max_steps 200` for a run that is finished.",
    )
    sub.add_argument("run", metavar="RUN_DIR", help="or the backup of a run (run.backup)")
    sub.add_argument(
        "--output_dir",
        metavar="DIR",
        type=Path,
        help="where to rebuild the run of a backup; by default where it was",
    )
    sub.add_argument("--dashboard", action="store_true", help="as `train` has it")


def _add_simulated(add: Add) -> None:
    sub = add_configured(
        add, "simulate", simulate, help="run a configuration on a simulated cluster"
    )
    sub.add_argument("--output", metavar="DIR", type=Path, help="where the timeline goes")
    sub.add_argument(
        "--workload", metavar="RUN_DIR", type=Path, help="lengths as a real run recorded them"
    )
    what = "fit the cost model of this machine to the log of a run on it"
    sub = add("calibrate", calibrate, help=what, epilog=_CALIBRATE)
    what = "trained with --drafting.window off, 20 steps or more"
    sub.add_argument("run_dir", metavar="RUN_DIR", type=Path, help=what)
    sub.add_argument("--output", metavar="FILE.json", type=Path, help="where the profile goes")


def train(args: argparse.Namespace) -> int:
    """Train, or with `--dry-run` check and show what would be trained."""
    from rhymeflow import check

    config = read_config(args.recipe, args.overrides)
    if args.dry_run:
        from rhymeflow.cli.dry_run import dry_run

        dry_run(config, is_full=args.dry_run == "full")
        return 0
    check.before_start(config)
    if config.runtime == "local":
        from rhymeflow.runtime import processes

        processes.prepare()  # its imports go on beside those that follow
        with processes.ended_by_interrupt():
            import rhymeflow.runtime.train  # noqa: F401 - takes long
    from rhymeflow.runtime.train import train

    return _to_its_end(lambda begin: train(config, begin=begin), args.dashboard)


def resume(args: argparse.Namespace) -> int:
    """Go on with a run."""
    from rhymeflow.runtime.resume_options import with_options
    from rhymeflow.runtime.train import resume

    def change(config: Config) -> Config:
        return with_options(config, args.overrides)

    run_dir = Path(args.run)
    if args.output_dir is not None or "://" in args.run or any(run_dir.glob("*/beginning.json")):
        from rhymeflow.store.backup import restore

        run_dir, said = restore(args.run, args.output_dir)
        print(*said, sep="\n", file=sys.stderr)
    return _to_its_end(lambda begin: resume(run_dir, change, begin=begin), args.dashboard)


def _to_its_end(run: Callable[[Callable[[Path], None]], object], has_dashboard: bool) -> int:
    """Carry a run on; `run` is given what to call with its directory, for a dashboard beside it."""
    from rhymeflow.runtime.supervisor import WorkerDied

    with ExitStack() as stack:

        def begin(run_dir: Path) -> None:
            if has_dashboard:
                from rhymeflow.dashboard.serve import beside

                print(f"dashboard: {stack.enter_context(beside(run_dir))}", flush=True)

        try:
            run(begin)
        except WorkerDied as error:  # a traceback of the controller would say nothing about it
            print(f"rhymeflow: {error}", file=sys.stderr)
            return 1
    return 0


def simulate(args: argparse.Namespace) -> int:
    """Run a configuration on a simulated cluster, and plot what happened."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from rhymeflow.sim.simulate import simulate as run

    config = read_config(args.recipe, args.overrides)
    columns = "step", MofNCompleteColumn(), BarColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    is_off = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_off) as bar:
        task = bar.add_task("", total=config.learner.max_steps)
        found = run(
            config,
            output=args.output,
            workload=args.workload,
            on_step=lambda step: bar.update(task, completed=step),
        )
    print(found.text())
    return 0


def calibrate(args: argparse.Namespace) -> int:
    """Fit the cost model to a run."""
    from rhymeflow.calibration import calibrate as fit

    print(fit(args.run_dir, output=args.output).text(args.output))
    return 0


def sft(args: argparse.Namespace) -> int:
    """Fine-tune a model on rows, and say the loss."""
    config = read_config(args.recipe, args.overrides, needed=("model", "data"))
    if args.dry_run:
        from rhymeflow.cli.dry_run import sft_dry_run

        sft_dry_run(config)
        return 0
    from rhymeflow.sft.train import train  # loads torch; mistakes are said without waiting for it

    train(config, lambda line: print(line, flush=True))
    return 0
