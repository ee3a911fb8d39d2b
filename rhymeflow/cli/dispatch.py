"""Parses the command line, runs the command, and reports mistakes with an exit code.

Commands that only look at runs are added without the others, because importing the configuration
for the others' options takes longer than the command."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import re
import select
import shutil
import signal
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from rhymeflow.cli import runs
from rhymeflow.cli.parser import Add, Parser, with_commands
from rhymeflow.errors import RunError, UserError, suggestion
from rhymeflow.utils import stopping


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; Ctrl-C is the caller's."""
    try:
        with stopping.as_interrupts():
            _dispatch(list(sys.argv[1:] if arguments is None else arguments))
            sys.stdout.flush()
            return 0
    except BrokenPipeError:
        if not _is_output_closed():
            raise
        # `| head` has read enough; what is still buffered is dropped at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except UserError as error:
        print(f"rhymeflow: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"rhymeflow: {error}", file=sys.stderr)
        return 1


def _is_output_closed() -> bool:
    """Whether standard output is a pipe without a reader."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(flags & select.POLLERR for _, flags in poll.poll(0))


def _dispatch(arguments: list[str]) -> None:
    command = arguments[0] if arguments else None
    if command == "bench":
        bench(arguments[1:])
        return
    if command is not None and command not in ("-h", "--help", "--version"):
        if command.startswith("-"):
            raise UserError(f"{command}: options come after the command, as in `rhymeflow train`")
        if command == "help":
            arguments = [*arguments[1:2], "--help"]
    parser, add = with_commands()
    if command in runs.NAMES:
        runs.add_commands(add)
        rest, overrides = arguments, dict[str, str]()
    else:
        rest, overrides = add_all(add, arguments)
    if not arguments:
        parser.print_help()
        return
    args, unknown = parser.parse_known_args(rest)
    absent = next((name for name in ("prompt", "recipe") if getattr(args, name, "") is None), None)
    if absent and unknown and not unknown[0].startswith("-"):
        setattr(args, absent, unknown.pop(0))  # argparse takes no optional argument after options
    if unknown or (overrides and not args.takes_fields):
        given = unknown[0] if unknown else f"--{next(iter(overrides))}"
        hint = _hint(given, args, parser.commands)
        raise UserError(f"{given.partition('=')[0]}: there is no such argument{hint}")
    _check_effect(args.called, overrides)
    args.overrides = overrides
    args.command(args)


_REST = "sft|learner|schedule|emulation|simulation|weights|cluster|ray|runtime"
_OF_SFT = (
    "(optimizer|muon|adam|weight|max_(grad|skip|tok)|frozen|logits|attention|gradient|num_[rt])"
)
_UNREAD = {
    "train": "sft",
    "simulate": "sft|eval|reward",
    "eval": _REST,
    "render": _REST,
    "generate": f"{_REST}|drafting|environment|reward|eval"
    r"|rollout\.(?!max_(comp|prefill)|temperature|top_|skip_|stop)\w+",
    "sft": "schedule|emulation|simulation|weights|cluster|ray|runtime|drafting|reward|eval|"
    rf"run\.(?!seed)\w+|rollout\.(?!max_comp)\w+|learner\.(?!{_OF_SFT})\w+",
}
"""Fields that a command reads nothing of. A file may have them, as it is for all commands."""


def _check_effect(command: str, overrides: Mapping[str, str]) -> None:
    """Raise `UserError` if an option is a field of another command."""
    if not overrides or command not in _UNREAD:
        return
    from rhymeflow.config import fields

    unread = re.compile(rf"({_UNREAD[command]})(\..*)?").fullmatch
    for name in overrides:
        if unread(name) and name in fields.field_paths():
            section, _, last = name.rpartition(".")  # learner and sft share names
            meant = fields.path_named(last, command) if "sft" in (command, section) else None
            hint = f"; did you mean --{meant}?" if meant and not unread(meant) else ""
            raise UserError(f"--{name}: has no effect in `rhymeflow {command}`{hint}")


def add_all(add: Add, arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Add all commands; return (arguments, overrides), with the overrides of the configuration's
    fields taken out of the arguments."""
    from rhymeflow.cli import training
    from rhymeflow.config import Config
    from rhymeflow.config.load import split_overrides

    training.add_commands(add)
    runs.add_commands(add)
    add("recipes", recipes, help="list the ready configurations")
    sub = add("doctor", doctor, help="what this machine can run, and what is missing")
    what = "a run, to compare its number of GPUs"
    sub.add_argument("recipe", nargs="?", metavar="RECIPE_OR_FILE", help=what)
    what = "also measure the GPU, and what two of them exchange (`bench gpu --part 1a`)"
    sub.add_argument("--gpu", action="store_true", help=what)
    add("bench", None, help="run a benchmark: `rhymeflow bench` lists them", add_help=False)
    if arguments and arguments[0] in _TAKES_FIELDS:
        options = _WITHOUT_VALUE if arguments[0] == "train" else _HELP
        arguments = [options.get(each, each) for each in arguments]
        if arguments[1:2] == ["--help=common"] and {*arguments[2:3]} & {*Config.model_fields}:
            arguments = [arguments[0], f"--help={arguments[2]}"]  # given as `--help SECTION`
    return split_overrides(arguments)


_TAKES_FIELDS = ("train", "simulate", "sft", "eval", "render")
_HELP = {"--help": "--help=common", "-h": "--help=common"}
_WITHOUT_VALUE = {**_HELP, "--dry-run": "--dry-run=full"}
"""Replacements of options without a value, so that they do not take the next argument as one."""


def _hint(
    given: str, args: argparse.Namespace, commands: Mapping[str, argparse.ArgumentParser]
) -> str:
    """Return a suggestion for an unknown argument, or ""."""
    option = given.partition("=")[0]
    name = option.lstrip("-")
    elsewhere = [each for each, sub in commands.items() if option in sub._option_string_actions]
    wrong_command = f"; it is an option of {', '.join(elsewhere)}" if elsewhere else ""
    if not args.takes_fields:
        return suggestion(option, args.options) or wrong_command
    from rhymeflow.config import Config, fields
    from rhymeflow.config.help import SECTION_IN_FULL
    from rhymeflow.config.load import SHORT

    section = SECTION_IN_FULL.get(args.called, "")
    if not option.startswith("-"):
        if name == "plan" and getattr(args, "dry_run", None):
            return "; did you mean --dry-run=plan?"
        path = fields.path_named(name, section) or fields.path_named(name.rpartition(".")[2])
        if "=" in given or path is not None:
            return f"; fields are given as --{path or 'section.field'} VALUE"
        recipe = getattr(args, "recipe", None)
        return f"; {recipe!r} is the recipe or file already" if recipe else ""
    if name in Config.model_fields:
        return f"; its fields are given as --{name}.FIELD VALUE (--help={name} lists them)"
    if name in ("config", "recipe", "file"):
        return "; a recipe or a YAML file is given without an option, after the command"
    if (path := fields.path_named(name, section)) is not None:
        return f"; did you mean --{path}?"
    nearest = suggestion(option, [*args.options, *(f"--{name}" for name in SHORT)])
    if wrong_command or nearest:
        return wrong_command or nearest
    return fields.nearest_field(name, section).replace("did you mean ", "did you mean --")


def recipes(args: argparse.Namespace) -> None:
    """List the ready configurations; on a terminal their sentences are wrapped."""
    from rhymeflow.config.load import list_recipes

    names = list_recipes()
    room = max(map(len, names), default=0) + 2
    columns = max(shutil.get_terminal_size().columns, 60) if sys.stdout.isatty() else 10**6
    for name, sentence in names.items():
        print(name.ljust(room) + f"\n{'':{room}}".join(textwrap.wrap(sentence, columns - room)))


def doctor(args: argparse.Namespace) -> None:
    """Print what this machine can run, what is missing and how to get it."""
    from rhymeflow.config.load import read_config
    from rhymeflow.doctor import examine

    print(examine(read_config(args.recipe, {}) if args.recipe else None), flush=True)
    if args.gpu:
        bench(["gpu", "--part", "1a"])


# -- benchmarks ------------------------------------------------------------------------------------


def bench(arguments: list[str]) -> None:
    """Run `benchmarks/NAME.py`; without a name, list them."""
    benchmarks = _benchmarks()
    names = sorted(
        module.name
        for module in pkgutil.iter_modules(benchmarks.__path__)
        if not module.ispkg and module.name != "harness"
    )
    parser = Parser(prog="rhymeflow bench", allow_abbrev=False)
    if not arguments or arguments[0].startswith("-"):
        parser.add_argument("name", nargs="?", metavar="NAME", help=", ".join(names))
        parser.parse_args(arguments)
        print(f"benchmarks: {', '.join(names)} (rhymeflow bench NAME --help)")
        return
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


def _benchmarks() -> ModuleType:
    """Import the benchmarks of the checkout that this package runs from."""
    root = Path(__file__).resolve().parent.parent.parent
    if not (root / "benchmarks" / "harness.py").is_file():
        raise UserError(
            f"bench: the benchmarks are not beside the installed package ({root}); they are part "
            "of the source: clone it and install with `pip install -e .`"
        )
    sys.path.insert(0, str(root))
    return importlib.import_module("benchmarks")
