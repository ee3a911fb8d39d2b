"""What `--help` says of the configuration: its sections and fields, with meaning and default.

The meaning is the text below the field in its section. Lines are at most 80 characters wide.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from rhymeflow.config import Config, Section
from rhymeflow.config.fields import brief, nearest_field, section_of
from rhymeflow.errors import UserError, suggestion

WIDTH = 80

COMMON = (
    "runtime", "model.name", "model.dtype", "model.device",
    "data.source", "data.prompt_column", "data.eval_source", "data.eval_size",
    "data.system_prompt", "data.max_prompt_length",
    "rollout.num_generations", "rollout.max_completion_length", "rollout.temperature",
    "rollout.num_instances", "rollout.max_num_seqs",
    "drafting.window", "drafting.history_run",
    "reward.functions", "reward.timeout", "reward.on_failure",
    "learner.max_steps", "learner.groups_per_batch", "learner.learning_rate", "learner.beta",
    "learner.loss_type", "learner.max_tokens_per_microbatch",
    "schedule.name", "schedule.max_staleness",
    "weights.transport",
    "run.seed", "run.output_dir", "run.eval_steps", "run.save_steps", "run.report_to",
)  # fmt: skip
"""What most runs set."""

INTRODUCTION = """\
Every field of the configuration is an option. Below are the common ones, with
their [defaults]; --help=all has every field in full, --help=learner those of a
section, --help=learner.beta one."""

SHORT = {
    "model": ("M", "a local directory or a hub name (model.name)"),
    "data": ("FILE", "CSV, JSON, JSONL or Parquet; text also compressed (data.source)"),
    "reward": ("F", "file.py:function, or a built-in; several are added up (reward.functions)"),
    "schedule": ("NAME", "how rollout and training overlap (schedule.name)"),
    "history": ("RUN_DIR", "a run to draft from (drafting.history_run)"),
}
"""Options that stand for a field. They are taken out before argparse sees them."""


SHOWN_ALONE = ("simulation", "cluster", "sft", "eval")
"""Sections that a run does not use: help of their own commands, and `--help=NAME`, show them."""

WHOLE = {"simulate": "simulation", "sft": "sft", "eval": "eval"}
"""The section that is a command's own, which its help shows in full."""


class Page(argparse.RawDescriptionHelpFormatter):
    """80 columns, and options beside what they mean."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=22, width=WIDTH)


class Help(argparse.Action):
    """`--help`: the command's usage and the common fields; `=all`, `=SECTION`, `=FIELD`: those."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Print, and exit with 0."""
        if values == "common":
            whole = WHOLE.get(parser.prog.rpartition(" ")[2])
            text = f"{parser.format_help()}\n{INTRODUCTION}\n\n{common(whole)}"
        else:
            text = all_fields(None if values == "all" else values)
        try:
            print(text, flush=True)
        except BrokenPipeError:  # `| head` has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        parser.exit()


def common(whole: str | None = None) -> str:
    """The sections, and of each the fields that most runs set, by their first sentence.

    Of the section called `whole`, all fields; of one in `SHOWN_ALONE` otherwise none.
    """
    outside = [_entry(*each) for each in _outside() if each[0] in COMMON]
    parts = ["\n".join(outside)]
    for name, section in _sections():
        if name in SHOWN_ALONE and name != whole:
            continue
        entries = [
            _entry(path, field, _in_short(field))
            for path, field in _fields(name, section)
            if path in COMMON or name == whole
        ]
        parts.append("\n".join([_heading(name, section), *entries]))
    return "\n\n".join(parts)


def all_fields(only: str | None = None) -> str:
    """Every field with all that is said of it; or those of one section, or one field.

    Raises:
        UserError: there is no section or field called `only`.
    """
    outside = [_entry(*each) for each in _outside() if only in (None, each[0])]
    parts = ["\n".join(outside)] if outside else []
    for name, section in _sections():
        whole = only in (None, name)
        entries = [
            _entry(path, field) for path, field in _fields(name, section) if whole or path == only
        ]
        if entries:
            parts.append("\n".join([_heading(name, section), *entries]))
    if not parts:
        assert only is not None
        names = [name for name, _ in _sections()]
        hint = suggestion(only, [*names, "all"]) or nearest_field(only)
        raise UserError(
            f"--help={only}: there is no such section or field{hint} "
            f"(--help=all, or one of {', '.join(names)})"
        )
    return "\n\n".join(parts)


def _sections() -> Iterator[tuple[str, type[Section]]]:
    for name, field in Config.model_fields.items():
        section = section_of(field.annotation)
        if section is not None:
            yield name, section


def _outside() -> Iterator[tuple[str, FieldInfo]]:
    """The fields outside all sections."""
    for name, field in Config.model_fields.items():
        if section_of(field.annotation) is None:
            yield name, field


def _fields(prefix: str, section: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    """Path and definition of each field, those of sections within it too."""
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            yield from _fields(f"{prefix}.{name}", inner)
        else:
            yield f"{prefix}.{name}", field


def _heading(name: str, section: type[Section]) -> str:
    what = (section.__doc__ or "").strip().split("\n\n")[0]
    return textwrap.fill(f"{name}: {' '.join(what.split())}", WIDTH)


def _entry(path: str, field: FieldInfo, text: str = "") -> str:
    """A field, with this text or all that is said of it."""
    head, indent = f"  --{path} [{_shown(field.default)}]", " " * 6
    text = text or _meaning(field)
    return f"{head}\n" + textwrap.fill(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def _meaning(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _shown(default: Any) -> str:
    """A default as YAML would have it."""
    if isinstance(default, tuple):
        values = [
            each.model_dump(mode="json", exclude_defaults=True) if isinstance(each, Section)
            else each
            for each in default
        ]  # fmt: skip
        return brief(values)
    return default if isinstance(default, str) else brief(default)


def _in_short(field: FieldInfo) -> str:
    """What there is to choose from, and the first sentence, unless that is of one choice."""
    names, text = _choices(field.annotation), _meaning(field)
    # A sentence ends where a blank and a capital or a choice follow.
    found = re.match(r"(.+?)[.;:](?= [A-Z`]|$)", text)
    sentence = f"{found[1]}." if found else text
    if not names:
        return sentence
    first = "" if sentence.startswith("`") else f"{sentence} "
    return f"{first}One of {', '.join(names)}."


def _choices(annotation: Any) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return next((found for each in get_args(annotation) if (found := _choices(each))), ())
