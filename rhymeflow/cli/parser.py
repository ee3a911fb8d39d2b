"""The argument parser of all commands, and types of option values."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import rhymeflow
from rhymeflow.errors import UserError, suggestion

Add = Callable[..., argparse.ArgumentParser]
"""Adds a command: name, function, `takes_fields` (of the configuration), parser options."""


class Parser(argparse.ArgumentParser):
    """Reports mistakes as a `UserError` in one line."""

    commands: Mapping[str, argparse.ArgumentParser] = {}  # parsers of commands, by name

    def error(self, message: str) -> NoReturn:
        """Raise the message as `UserError`."""
        raise UserError(f"{message} (see `{self.prog} --help`)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check the value as argparse does, but suggest the nearest choice."""
        if action.choices is not None and value not in action.choices:
            names = [str(each) for each in action.choices]
            hint = suggestion(str(value), names)
            message = f"invalid choice: {value!r} (choose from {', '.join(names)}){hint}"
            raise argparse.ArgumentError(action, message)


class _Version(argparse.Action):
    """Prints the version, and looks it up only when it is asked for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print the version and exit."""
        print(f"rhymeflow {rhymeflow.__version__}")
        parser.exit()


def with_commands() -> tuple[Parser, Add]:
    """Return a parser of `rhymeflow` without commands, and a function that adds one."""
    parser = Parser(
        prog="rhymeflow", description="Asynchronous RL post-training of language models."
    )
    parser.add_argument("--version", action=_Version, help="show the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    parser.commands = commands.choices

    def add(
        name: str, command: object, *, takes_fields: bool = False, **options: Any
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, allow_abbrev=False, **options)
        by_option = sub._option_string_actions
        sub.set_defaults(command=command, takes_fields=takes_fields, options=by_option, called=name)
        return sub

    return parser, add


def whole(text: str, least: int = 0) -> int:
    """Parse an integer of at least `least`, for argparse."""
    if not text.isdecimal() or len(text) > 18 or int(text) < least:
        raise argparse.ArgumentTypeError(f"given {text!r}, should be a number from {least} on")
    return int(text)


positive = partial(whole, least=1)


def as_number(text: str) -> float:
    """Parse a number; return NaN if the text is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def temperature(text: str) -> float:
    """Parse a temperature with the configuration's limits, for argparse."""
    from rhymeflow.config.section import LEAST_TEMPERATURE  # not above: importing it is slow

    value = as_number(text)
    if value != 0 and not LEAST_TEMPERATURE <= value < math.inf:
        raise argparse.ArgumentTypeError(
            f"given {text!r}, should be 0 (greedy) or at least {LEAST_TEMPERATURE:g}"
        )
    return value
