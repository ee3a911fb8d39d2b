"""Reads a recipe or a YAML file plus command-line overrides into a `Config`, and writes it back.

Holds true: every mistake is one `UserError` line with the field's path, where it stands, what was
given, what is allowed and the nearest existing name; `loads(dump(config)) == config`. Knows nothing
of torch or of what the fields mean.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from rhymeflow import yaml12
from rhymeflow.config import Config, Section
from rhymeflow.errors import UserError

RECIPES = Path(__file__).parent / "recipes"
"""The folder of ready configurations, one `NAME.yaml` each."""

Overrides = Mapping[str, str]
"""Field paths with their values as YAML text, such as `{"learner.learning_rate": "1e-5"}`."""


def recipes() -> dict[str, str]:
    """Return the ready configurations: name and the first comment line of its file."""
    found = {}
    for path in sorted(RECIPES.glob("*.yaml")):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        found[path.stem] = first.lstrip("# ").strip() if first.startswith("#") else ""
    return found


def load(recipe_or_file: str, overrides: Overrides | None = None) -> Config:
    """Read a recipe by name, or a YAML file, with `overrides` put over it.

    Raises `UserError` for a name or file that is not there, broken YAML, and each wrong field.
    """
    path = _locate(recipe_or_file)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    return loads(text, overrides, where=str(path))


def loads(text: str, overrides: Overrides | None = None, *, where: str = "<text>") -> Config:
    """Read YAML text, with `overrides` put over it; `where` names the text in messages."""
    node = yaml12.compose(text, where)
    values = yaml12.construct(node, where) if node is not None else {}
    if not isinstance(values, dict):
        raise UserError(f"{where}: should be a mapping of sections, such as `learner:`")
    # A section whose every line is commented out reads as null, and means its defaults.
    values = {key: {} if value is None else value for key, value in values.items()}
    source = _Source(where, node, frozenset(overrides or ()))
    for name, value in (overrides or {}).items():
        _override(values, name, value)
    return _validate(values, source)


def dump(config: Config) -> str:
    """Write a configuration, every field of it, as YAML that loads back equal."""
    return yaml12.write(config.model_dump(mode="json"))


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Part `--section.field VALUE` and `--section.field=VALUE` from the other arguments.

    Raises `UserError` for a field given twice or without a value.
    """
    rest: list[str] = []
    overrides: dict[str, str] = {}
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not _is_field_like(name):
            rest.append(argument)
            continue
        if not equals:
            following = next(remaining, None)
            if following is None or following.startswith("--"):
                raise UserError(f"--{name}: needs a value")
            value = following
        if name in overrides:
            raise UserError(f"--{name}: given twice")
        overrides[name] = value
    return rest, overrides


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` that is most like `name`, if any is alike."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)), None)


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return `; did you mean X?`, or nothing where no name is alike."""
    found = nearest(name, names)
    return f"; did you mean {found}?" if found else ""


def nearest_field(path: str) -> str:
    """Return `; did you mean X?`: the same name in another section, else the most similar name."""
    paths = field_paths()
    section, _, name = path.rpartition(".")
    elsewhere = [known for known in paths if known.rpartition(".")[2] == name]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    beside = [known for known in paths if known.rpartition(".")[0] == section]
    return suggestion(path, beside) or suggestion(path, paths) or _by_last_name(name, paths)


def field_paths() -> list[str]:
    """Return the dotted path of every field of `Config`."""
    return list(_paths(Config, ""))


# -- finding the file -----------------------------------------------------------------------------


def _locate(recipe_or_file: str) -> Path:
    path = RECIPES / f"{recipe_or_file}.yaml"
    if re.fullmatch(r"[\w-]+", recipe_or_file) and path.is_file():
        return path
    path = Path(recipe_or_file).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise UserError(f"{recipe_or_file}: is a directory; a recipe's name or a YAML file is due")
    names = recipes()
    raise UserError(
        f"{recipe_or_file}: there is no such recipe or file"
        f"{suggestion(recipe_or_file, names)} (recipes: {', '.join(names) or 'none'})"
    )


# -- overrides ------------------------------------------------------------------------------------


def _is_field_like(name: str) -> bool:
    """Whether an option's name is a field: has a dot, or is a field outside all sections."""
    top = Config.model_fields
    outside = name in top and _section_of(top[name].annotation) is None
    return outside or re.fullmatch(r"\w[\w-]*(\.[\w-]+)+", name) is not None


def _override(values: dict[str, Any], name: str, text: str) -> None:
    """Put one value into the nested `values`; a number walks into a list."""
    where = f"--{name}"
    *parents, last = name.split(".")
    at: Any = values
    for parent in parents:
        at = at.setdefault(parent, {}) if isinstance(at, dict) else at[_index(at, parent, where)]
    if isinstance(at, dict):
        at[last] = _value(text, name)
    else:
        at[_index(at, last, where)] = _value(text, name)


def _index(at: Any, part: str, where: str) -> int:
    if not isinstance(at, list):
        raise UserError(f"{where}: {_brief(at)} has no part {part!r}")
    if not part.isdigit() or int(part) >= len(at):
        raise UserError(f"{where}: {part!r} is not an index into a list of {len(at)}")
    return int(part)


def _value(text: str, name: str) -> Any:
    """Read an override's text; a field that takes text gets it as it was typed."""
    where = f"--{name}"
    node = yaml12.compose(text, where)
    value = yaml12.construct(node, where) if node is not None else None
    if _takes_text(name) and isinstance(value, bool | int | float):
        return text
    return value


def _takes_text(name: str) -> bool:
    section: type[Section] | None = Config
    annotation: Any = None
    for part in name.split("."):
        if section is None or part not in section.model_fields:
            return False
        annotation = section.model_fields[part].annotation
        section = _section_of(annotation)
    return annotation is str or str in get_args(annotation)


# -- validation and its messages ------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """Where values came from: a text's nodes, and the fields the command line gave."""

    name: str
    node: yaml.Node | None
    overridden: frozenset[str]

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
            if isinstance(node, yaml.MappingNode):
                found = next(((k, v) for k, v in node.value if k.value == part), None)
                if found is None:
                    return line
                line, node = found[0].start_mark.line + 1, found[1]
            elif isinstance(node, yaml.SequenceNode) and part.isdigit():
                node = node.value[int(part)]
                line = node.start_mark.line + 1
            else:
                return line
        return line


def _validate(values: dict[str, Any], source: _Source) -> Config:
    try:
        text = json.dumps(values)
    except ValueError:
        raise UserError(f"{source.name}: an alias refers to itself") from None
    try:
        # JSON rules let lists stand for tuples and still refuse `true` for a number.
        return Config.model_validate_json(text, strict=True)
    except ValidationError as error:
        messages = [_message(dict(details), source) for details in error.errors()]
        raise UserError("; ".join(messages)) from None


def _message(details: dict[str, Any], source: _Source) -> str:
    """Return one mistake as: where, which field, what was given, what is allowed."""
    path = ".".join(str(part) for part in details["loc"])
    place = source.place(path)
    kind, given = details["type"], _brief(details["input"])
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
    allowed = details["msg"].removeprefix("Input ")
    return f"{place}: given {given}, {allowed}"


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _by_last_name(name: str, paths: list[str]) -> str:
    last_names = {path.rpartition(".")[2]: path for path in paths}
    found = nearest(name, last_names)
    return f"; did you mean {last_names[found]}?" if found else ""


def _paths(section: type[Section], prefix: str) -> Iterable[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        inner = _section_of(field.annotation)
        if inner is not None:
            yield from _paths(inner, f"{prefix}{name}.")


def _section_of(annotation: Any) -> type[Section] | None:
    is_section = isinstance(annotation, type) and issubclass(annotation, Section)
    return annotation if is_section else None
