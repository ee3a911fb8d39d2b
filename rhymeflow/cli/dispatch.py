"""Which command is meant, what it returns, and how a mistake is said.

Holds true: as the package says of all commands. Those that only look at runs are found without the
others, whose options are the configuration's: to import that takes longer than to look.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from rhymeflow.cli import runs
from rhymeflow.cli.parser import Add, with_commands
from rhymeflow.errors import StorageError, UserError, suggestion


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        return _dispatch(list(sys.argv[1:] if arguments is None else arguments))
    except UserError as error:
        print(f"rhymeflow: {error}", file=sys.stderr)
        return 2
    except StorageError as error:
        print(f"rhymeflow: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("rhymeflow: interrupted", file=sys.stderr)
        return 130


def _dispatch(arguments: list[str]) -> int:
    command = arguments[0] if arguments else None
    if command == "bench":
        from rhymeflow.cli.bench import bench

        return bench(arguments[1:])
    parser, add = with_commands()
    if command in runs.NAMES:
        runs.add_commands(add)
        rest, overrides = arguments, dict[str, str]()
    else:
        rest, overrides = _add_all(add, arguments)
    if not arguments:
        parser.print_help()
        return 0
    args, unknown = parser.parse_known_args(rest)
    if unknown or (overrides and not args.takes_fields):
        raise UserError(_no_such_argument(args, unknown, overrides))
    args.overrides = overrides
    result: int = args.command(args)
    return result


def _add_all(add: Add, arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Add all commands; return the arguments without fields of the configuration, and those."""
    from rhymeflow.cli import models, training
    from rhymeflow.config.load import split_overrides

    training.add_commands(add)
    models.add_commands(add)
    runs.add_commands(add)
    add("recipes", recipes, help="list the ready configurations")
    add("doctor", doctor, help="what this machine can run, and what is missing")
    add("bench", None, help="run a benchmark: `rhymeflow bench` lists them", add_help=False)
    if arguments and arguments[0] in ("train", "simulate", "calibrate", "sft", "eval"):
        arguments = [_WITHOUT_VALUE.get(each, each) for each in arguments]
    return split_overrides(arguments)


_WITHOUT_VALUE = {"--dry-run": "--dry-run=full", "--help": "--help=common", "-h": "--help=common"}
"""What an option means that may have a value: it is not to take what follows it for one."""


def _no_such_argument(
    args: argparse.Namespace, unknown: Sequence[str], overrides: Mapping[str, str]
) -> str:
    """Say which argument is none, and which one is nearest."""
    option = (unknown[0] if unknown else f"--{next(iter(overrides))}").partition("=")[0]
    if not option.startswith("-"):
        recipe = getattr(args, "recipe", None)
        hint = f"; {recipe!r} is the recipe or file already" if recipe else ""
        return f"{option}: there is no such argument{hint}"
    if not args.takes_fields:
        return f"{option}: there is no such argument{suggestion(option, args.options)}"
    from rhymeflow.config import fields
    from rhymeflow.config.load import SHORT

    hint = suggestion(option, [*args.options, *(f"--{name}" for name in SHORT if unknown)])
    if not hint:
        hint = fields.nearest_field(option.lstrip("-")).replace("mean ", "mean --")
    return f"{option}: there is no such argument{hint}"


def recipes(args: argparse.Namespace) -> int:
    """List the ready configurations."""
    from rhymeflow.config.load import list_recipes

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


__all__ = ["main"]
