"""Formats the configuration for `--help`: sections and fields, with meaning and default."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from rhymeflow.config import Config
from rhymeflow.config.fields import brief, every_field, nearest_field, section_of
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
    "learner.algorithm", "learner.max_tokens_per_microbatch",
    "schedule.name", "schedule.max_staleness",
    "weights.transport", "emulation.profile", "emulation.devices",
    "run.seed", "run.output_dir", "run.eval_steps", "run.save_steps", "run.report_to",
)  # fmt: skip
"""Fields that `--help` shows."""

INTRODUCTION = """\
Every field of the configuration is an option. Below are the common ones, with
their [defaults]; --help=all describes every field in full, --help=learner those
of a section, --help=learner.beta one field."""

SHOWN_ALONE = ("simulation", "cluster", "sft", "eval")
"""Sections that training does not use: shown only by the commands in `SECTION_IN_FULL`."""

SECTION_IN_FULL = {"simulate": "simulation", "sft": "sft", "eval": "eval"}
"""By command, the section of which its help shows all fields."""


class Page(argparse.RawDescriptionHelpFormatter):
    """argparse's help in `WIDTH` columns."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=22, width=WIDTH)


class Help(argparse.Action):
    """`--help` prints usage and common fields; `=all`, `=SECTION` and `=FIELD` print only those."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: Any, *_: object
    ) -> None:
        """Print, then exit with code 0."""
        if values == "common":
            in_full = SECTION_IN_FULL.get(parser.prog.rpartition(" ")[2])
            text = f"{parser.format_help()}\n{INTRODUCTION}\n\n{common(in_full)}"
        else:
            text = all_fields(None if values == "all" else values)
        print(text, flush=True)
        parser.exit()


def common(in_full: str | None = None) -> str:
    """Return the fields in `COMMON` by section, each with the first sentence of its docstring.

    The section `in_full` is shown with all its fields; others in `SHOWN_ALONE` are left out."""
    parts = []
    for name, heading, fields in sections():
        if name not in SHOWN_ALONE or name == in_full:
            text = _short_text if name else full_text
            chosen = [each for each in fields if each[0] in COMMON or name == in_full]
            parts.append("\n".join([*heading, *(_entry(path, f, text(f)) for path, f in chosen)]))
    return "\n\n".join(parts)


def all_fields(only: str | None = None) -> str:
    """Return the full text of every field, of those in section `only`, or of the field `only`.
    Raises `UserError` if there is no such section or field."""
    parts, names = [], []
    for name, heading, fields in sections():
        names.append(name)
        is_whole = only is None or (name == only and name != "")
        shown = [_entry(path, f, full_text(f)) for path, f in fields if is_whole or path == only]
        if shown:
            parts.append("\n".join([*heading, *shown]))
    if not parts:
        assert only is not None
        names.remove("")  # the fields outside of sections
        hint = suggestion(only, [*names, "all"]) or nearest_field(only)
        raise UserError(
            f"--help={only}: there is no such section or field{hint} "
            f"(--help=all, or one of {', '.join(names)})"
        )
    return "\n\n".join(parts)


def sections() -> Iterator[tuple[str, list[str], list[tuple[str, FieldInfo]]]]:
    """Yield name, heading and fields of each section; first those outside of sections, named ""."""
    top = Config.model_fields.items()
    yield "", [], [(name, field) for name, field in top if section_of(field.annotation) is None]
    for name, field in top:
        if (section := section_of(field.annotation)) is not None:
            summary = (section.__doc__ or "").strip().split("\n\n")[0]
            heading = textwrap.fill(f"{name}: {' '.join(summary.split())}", WIDTH)
            within = every_field(section, f"{name}.")
            yield name, [heading], [each for each in within if not section_of(each[1].annotation)]


def _entry(path: str, field: FieldInfo, text: str) -> str:
    indent = " " * 6
    return f"  --{path} [{shown_default(field)}]\n" + textwrap.fill(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def shown_default(field: FieldInfo) -> str:
    """Return a field's default as text."""
    # `exclude_defaults` shortens lists of sections to the values that differ from their defaults.
    kind: TypeAdapter[Any] = TypeAdapter(field.annotation or Any)
    default = kind.dump_python(field.default, mode="json", exclude_defaults=True)
    return default if isinstance(default, str) else brief(default)


def full_text(field: FieldInfo) -> str:
    """Return a field's docstring on one line."""
    return " ".join((field.description or "").split())


def _short_text(field: FieldInfo) -> str:
    """Return the first sentence, unless it describes a choice, followed by the list of choices."""
    names, text = _choices(field.annotation), full_text(field)
    # A sentence ends before a space and a capital letter or a choice.
    match = re.match(r"(.+?)[.;:](?= [A-Z`]|$)", text)
    sentence = f"{match[1]}." if match else text
    if not names:
        return sentence
    first = "" if sentence.startswith("`") else f"{sentence} "
    return f"{first}One of {', '.join(names)}."


def _choices(annotation: Any) -> tuple[str, ...]:
    """Return the values of the `Literal` in the annotation, or () if there is none."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return next((names for each in get_args(annotation) if (names := _choices(each))), ())
