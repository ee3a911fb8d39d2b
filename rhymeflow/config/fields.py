"""Validates nested values and finds fields by name.

Each mistake is one line: place, path of the field, what was given, what is allowed, nearest name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from rhymeflow.config import Config, Section
from rhymeflow.errors import UserError, closest, suggestion


@dataclass(frozen=True)
class Origin:
    """Where values come from: a YAML text, and fields given on the command line."""

    name: str
    node: Node | None = None
    overridden: frozenset[str] = frozenset()

    def place(self, path: str) -> str:
        """Return `--path` or `file:line: path`."""
        if any(path == name or path.startswith(f"{name}.") for name in self.overridden):
            return f"--{path}"
        if not path:
            return self.name
        line = self._line(path)
        if line is None:
            below = next((name for name in self.overridden if name.startswith(f"{path}.")), None)
            if below is not None:
                return f"--{below}: {path}"
        return f"{self.name}:{line}: {path}" if line else f"{self.name}: {path}"

    def _line(self, path: str) -> int | None:
        node, line = self.node, None
        for part in path.split("."):
            if isinstance(node, MappingNode):
                found = next(((k, v) for k, v in node.value if k.value == part), None)
                if found is None:
                    return line
                line, node = found[0].start_mark.line + 1, found[1]
            elif isinstance(node, SequenceNode) and part.isdigit():
                node = node.value[int(part)]
                line = node.start_mark.line + 1
            else:
                return line
        return line


def validate(values: dict[str, Any], origin: Origin) -> Config:
    """Make a `Config` of nested values; raises `UserError` with every mistake in one line."""
    try:
        text = json.dumps(written_out(values, Config))
    except TypeError as error:
        raise UserError(f"{origin.name}: {error}") from None
    try:
        # JSON rules let lists stand for tuples and still refuse `true` for a number.
        return Config.model_validate_json(text, strict=True)
    except ValidationError as error:
        messages = [message(dict(details), origin) for details in error.errors()]
        raise UserError("; ".join(messages)) from None


def written_out(value: Any, kind: Any) -> Any:
    """Expand what the type `kind` lets one abbreviate.

    One value where a list is due becomes a list of one; text where a section is due becomes a
    mapping with the section's `by_name` field.
    """
    if get_origin(kind) in (Union, UnionType):
        kinds = [each for each in get_args(kind) if each is not type(None)]
        return value if value is None or len(kinds) > 1 else written_out(value, kinds[0])
    if get_origin(kind) is Annotated:
        return written_out(value, get_args(kind)[0])
    if get_origin(kind) is tuple and value is not None:
        each = value if isinstance(value, list | tuple) else [value]
        return [written_out(one, get_args(kind)[0]) for one in each]
    if (section := section_of(kind)) is None:
        return value
    if isinstance(value, str) and section.by_name is not None:
        value = {section.by_name: value}
    if not isinstance(value, dict):
        return value
    known = section.model_fields
    return {k: written_out(v, known[k].annotation) if k in known else v for k, v in value.items()}


def every_field(
    section: type[Section] = Config, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """Dotted path and definition of each field; a section comes before its own fields."""
    for name, field in section.model_fields.items():
        yield prefix + name, field
        inner = section_of(field.annotation)
        if inner is not None:
            yield from every_field(inner, f"{prefix}{name}.")


def field_paths() -> list[str]:
    """Return the dotted path of every field of `Config`."""
    return [path for path, _ in every_field()]


def is_field_like(name: str) -> bool:
    """Whether an option names a field: it has a dot, or is a field outside of sections."""
    top = Config.model_fields
    outside = name in top and section_of(top[name].annotation) is None
    return outside or re.fullmatch(r"\w[\w-]*(\.[\w-]+)+", name) is not None


def takes_text(name: str) -> bool:
    """Whether the field takes text, which is not parsed as YAML."""
    field = dict(every_field()).get(name)
    kind = None if field is None else field.annotation
    is_union = get_origin(kind) in (Union, UnionType)
    return kind is str or (is_union and str in get_args(kind))


def only_path(name: str, where: str) -> str:
    """Return the path of the only field with this name outside section `sft`.

    Raises:
        UserError: no field has it, or several; the message begins with `where`.
    """
    paths = [path for path in field_paths() if not path.startswith("sft.")]
    homes = [path for path in paths if path.rpartition(".")[2] == name]
    if not homes:
        raise UserError(f"{where}: there is no field {name!r}{nearest_field(name)}")
    if len(homes) > 1 and name not in homes:
        raise UserError(f"{where}: {name!r} could be {' or '.join(homes)}; give the whole name")
    return name if name in homes else homes[0]


_OTHERS = {
    "learning_rate": "lr", "lr_scheduler_type": "lr_scheduler", "warmup_steps": "warmup",
    "groups_per_batch": "bs batch_size train_batch_size per_device_train_batch_size",
    "max_steps": "epochs num_epochs num_train_epochs steps num_steps total_steps",
    "max_completion_length": "max_tokens max_new_tokens max_length max_response_length",
    "num_generations": "group_size num_samples", "temperature": "temp", "weight_decay": "wd",
    "beta": "kl kl_coef kl_loss_coef", "epsilon": "clip_range clip_ratio",
    "max_grad_norm": "grad_clip", "num_ranks": "num_gpus gpus", "max_staleness": "async_level",
    "data.source": "dataset dataset_name train_file", "model.name": "model_path model_name_or_path",
    "reward.functions": "reward_funcs reward_fn", "output_dir": "output out save_dir",
    "report_to": "logger wandb", "save_steps": "save_freq", "eval_steps": "eval_freq",
}  # fmt: skip
USUAL = {other: name for name, others in _OTHERS.items() for other in others.split()}
"""Names that other trainers use for our fields; suggested in messages, never accepted."""


def named(name: str, own: str = "") -> str | None:
    """The field of this name in any section, or the one that is meant by it elsewhere.

    Of several, that of section `own`, or the first.
    """
    name = name.replace("-", "_")
    name = USUAL.get(name, name)
    paths = field_paths()
    found = [known for known in paths if f".{known}".endswith(f".{name}")]
    found = found or [known for known in paths if known.replace(".", "_") == name]
    return min(found, key=lambda known: not known.startswith(f"{own}."), default=None)


def nearest_field(path: str, own: str = "") -> str:
    """`; did you mean X?` with the same name in another section, else the most similar name."""
    paths = field_paths()
    section, _, name = path.rpartition(".")
    if (elsewhere := named(name, own or section)) is not None:
        return f"; did you mean {elsewhere}?"
    if section:
        beside = [known for known in paths if known.rpartition(".")[0] == section]
        if found := suggestion(path, beside) or suggestion(path, paths):
            return found
    # Of several fields with this last name the first: sections of a run come before the others.
    last_names = {path.rpartition(".")[2]: path for path in reversed(paths)}
    similar = closest(name, last_names)
    return f"; did you mean {last_names[similar]}?" if similar else ""


def brief(value: Any) -> str:
    """The value as JSON, shortened to 60 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def message(details: dict[str, Any], origin: Origin) -> str:
    """One of pydantic's errors as a line for the user."""
    path = ".".join(str(part) for part in details["loc"])
    place = origin.place(path)
    kind, given = details["type"], brief(details["input"])
    if kind == "extra_forbidden":
        return f"{place}: there is no such field (given {given}){nearest_field(path)}"
    if kind == "missing":
        return f"{place}: is missing"
    if kind == "value_error":
        return f"{place}: {details['ctx']['error']}"
    if kind == "model_type":
        return f"{place}: given {given}, should be a section: a mapping of fields"
    if kind == "literal_error":
        names = re.findall(r"'([^']*)'", details["ctx"]["expected"])
        hint = suggestion(str(details["input"]), names)
        return f"{place}: given {given}, allowed: {', '.join(names)}{hint}"
    return f"{place}: given {given}, {_allowed(details['msg'])}"


def _allowed(message: str) -> str:
    """pydantic's sentence in YAML's terms."""
    for jargon, plain in (
        ("Input ", ""),
        ("String ", ""),
        ("a valid integer", "an integer"),
        ("a valid array", "a list"),
        ("an object", "a mapping"),
        ("a valid ", "a "),
    ):
        message = message.replace(jargon, plain)
    return message


def section_of(annotation: Any) -> type[Section] | None:
    """The field's type if it is a section."""
    is_section = isinstance(annotation, type) and issubclass(annotation, Section)
    return annotation if is_section else None
