"""Reads a `Config` from a recipe or a YAML file and command-line overrides, and writes one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rhymeflow.config import Config, SftConfig, fields, yaml
from rhymeflow.config.algorithms import PARTS
from rhymeflow.config.rollout import OF_VLLM
from rhymeflow.errors import UserError, suggestion

RECIPES = Path(__file__).parent.parent / "recipes"

SHORT = {
    "model": "model.name",
    "data": "data.source",
    "reward": "reward.functions",
    "schedule": "schedule.name",
    "history": "drafting.history_run",
    "lora": "model.lora.rank",
}
"""Short options and the fields that they set; `split_overrides` handles them, not argparse."""

NEEDED = ("model", "data", "reward")
"""Options that training needs if neither a recipe nor a file is given."""

_DATA_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
"""Suffixes of data files; a user may give one by mistake in place of a configuration."""

Overrides = Mapping[str, str]
"""Field paths with their values as YAML text, such as `{"learner.learning_rate": "1e-5"}`."""


def list_recipes() -> dict[str, str]:
    """Return the recipes' names, each with the sentence that its file begins with, as a comment."""
    recipes = {}
    for path in sorted(RECIPES.glob("*.yaml")):
        said: list[str] = []
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.startswith("# ") or (said and said[-1].endswith(".")):
                break
            said.append(line.lstrip("# ").strip())
        recipes[path.stem] = " ".join(said)
    return recipes


def read_config(
    recipe_or_file: str | None, overrides: Overrides | None = None, needed: Sequence[str] = NEEDED
) -> Config:
    """Read a recipe by name, or a YAML file, and apply `overrides`.

    With `None` the overrides apply to the defaults and must include the `needed` options.

    Raises:
        UserError: there is no such recipe or file, it is not YAML, or fields are wrong."""
    if recipe_or_file is None:
        _check_complete(overrides or {}, needed)
        return parse_config("", overrides, where="the command line")
    path = _locate(recipe_or_file)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    return parse_config(text, overrides, where=str(path))


def parse_config(text: str, overrides: Overrides | None = None, *, where: str = "<text>") -> Config:
    """Read YAML text and apply `overrides`; `where` names the text in messages."""
    node, values = yaml.read(text, where)
    values = {} if node is None else values
    if not isinstance(values, dict):
        raise UserError(f"{where}: should be a mapping of sections, such as `learner:`")
    if theirs := next((name for name in fields.SECTIONS_OF_OTHERS if name in values), None):
        raise UserError(
            f"{where}: is a configuration of {fields.SECTIONS_OF_OTHERS[theirs]} (it has the "
            f"section {theirs!r}); docs/from-others.md has the names of its fields here"
        )
    # A section whose lines are all commented out is null in YAML, and means its defaults. The copy
    # through JSON separates values that YAML aliases share, so that an override changes only one.
    given = {key: v for key, v in values.items() if v is not None or not _is_section(key)}
    values = json.loads(json.dumps(given))
    values = fields.written_out(values, Config)
    overrides = overrides or {}
    _drop_replaced(values, overrides)
    for name, value in overrides.items():
        _put(values, name, _parsed(value, name), f"--{name}")
    origin = fields.Origin(where, node, frozenset(overrides))
    config = fields.validate(values, origin)
    fields.check_effect(config, origin)
    return _naming(overrides, config)


def _is_section(name: str) -> bool:
    top = Config.model_fields
    return name in top and fields.section_of(top[name].annotation) is not None


def config_from_json(text: str, *, where: str) -> Config:
    """Read the JSON text of `Config.model_dump_json`; `where` names it in messages."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise UserError(f"{where}: is not JSON: {error}") from None
    return fields.validate(values, fields.Origin(where))


def build_config(given: Mapping[str, Any], base: Config | None = None, *, where: str) -> Config:
    """Return the configuration `base`, by default `Config()`, with fields replaced.

    A name is a path, `learner.beta`, or its last part if that is unique, `beta`. Raises `UserError`
    if fields are wrong; `where` names the mapping in the message."""
    base = base or Config()
    values = fields.plain(base.model_dump(), fields.Origin(where))
    by_path = {n if "." in n else fields.only_path(n, where): v for n, v in given.items()}
    learner = values["learner"]
    if by_path.get("learner.algorithm", learner["algorithm"]) != learner["algorithm"]:
        values["learner"] = {name: value for name, value in learner.items() if name not in PARTS}
    for path, value in by_path.items():
        _put(values, path, value, f"{where}: {path}")
    config = fields.validate(values, fields.Origin(where))
    return _naming([*by_path, *(f"sft.{name}" for name in base.sft.model_fields_set)], config)


def _naming(paths: Iterable[str], config: Config) -> Config:
    """Return `config`, in which the fields of section `sft` among `paths` count as set."""
    for section, _, name in (path.partition(".") for path in paths):
        if section == "sft":
            config.sft.model_fields_set.update([name] if name else SftConfig.model_fields)
    return config


def dump_config(config: Config) -> str:
    """Return every field as YAML, which `parse_config` reads as an equal configuration."""
    return yaml.write(config.model_dump(mode="json"))


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Separate `--section.field VALUE` and `--section.field=VALUE` from the other arguments.

    With several `--reward` options, the reward is the sum of the functions.

    Raises:
        UserError: a field is given twice or without a value."""
    rest: list[str] = []
    overrides: dict[str, str] = {}
    rewards: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        option, equals, value = argument.removeprefix("--").partition("=")
        name = SHORT.get(option, option)
        if not argument.startswith("--") or not fields.is_field_like(name):
            rest.append(argument)
            continue
        if not equals:
            following = next(remaining, None)
            if following is None or following.startswith("--"):
                raise UserError(f"--{option}: needs a value")
            value = following
        if option == "reward":
            rewards.append(value)
        elif name in overrides:
            raise UserError(f"--{name}: given twice")
        else:
            overrides[name] = value
    if rewards and SHORT["reward"] in overrides:
        raise UserError("--reward and --reward.functions: two names of one field; give one")
    if rewards:
        overrides[SHORT["reward"]] = json.dumps([{"function": each} for each in rewards])
    return rest, overrides


# -- finding the file -----------------------------------------------------------------------------


def _locate(recipe_or_file: str) -> Path:
    path = RECIPES / f"{recipe_or_file}.yaml"
    if re.fullmatch(r"[\w.-]+", recipe_or_file) and path.is_file():
        return path
    path = Path(recipe_or_file).expanduser()
    if path.is_dir():
        raise UserError(
            f"{recipe_or_file}: is a directory; give a recipe's name or a YAML file (a model is "
            f"given as --model {path})"
        )
    if path.is_file() and any(f"{each}." in f"{path.name}.".lower() for each in _DATA_SUFFIXES):
        raise UserError(f"{recipe_or_file}: is not YAML; prompts are given as --data {path}")
    if path.is_file() and path.suffix == ".py":
        raise UserError(
            f"{recipe_or_file}: is not YAML; rewards are given as --reward {path}:FUNCTION"
        )
    if path.is_file() and path.suffix == ".toml":
        raise UserError(
            f"{recipe_or_file}: is TOML, and a configuration is YAML; docs/from-others.md has the "
            "names of prime-rl's fields here"
        )
    if path.exists():
        return path
    name, is_given, _ = recipe_or_file.partition("=")
    if is_given and fields.is_field_like(name):
        hint = "" if name in fields.field_paths() else fields.nearest_field(name)
        raise UserError(f"{recipe_or_file}: a field is given as --{name} VALUE{hint}")
    names = list_recipes()
    hint = suggestion(recipe_or_file, names)
    if "/" in recipe_or_file and path.suffix not in (".yaml", ".yml"):
        hint = hint or f"; a model is given as --model {recipe_or_file}"
    raise UserError(
        f"{recipe_or_file}: there is no such recipe or file{hint} "
        f"(recipes: {', '.join(names) or 'none'})"
    )


# -- overrides ------------------------------------------------------------------------------------


_EXAMPLES = {"model": "DIR_OR_HUB_NAME", "data": "FILE", "reward": "FILE.py:FUNCTION"}


def _check_complete(overrides: Overrides, needed: Sequence[str]) -> None:
    """Raise `UserError` if the overrides lack one of the `needed` options."""
    missing = [
        f"--{option}"
        for option in needed
        if not any(f"{name}.".startswith(f"{SHORT[option]}.") for name in overrides)
    ]
    example = " ".join(f"--{option} {_EXAMPLES[option]}" for option in needed)
    if len(missing) == len(needed):
        raise UserError(
            f"give a recipe ({', '.join(list_recipes())}), a YAML file, or a task of your own: "
            f"{example}"
        )
    if missing:
        raise UserError(
            f"without a recipe or a YAML file, {' and '.join(missing)} must be given too "
            f"(as in {example})"
        )


def _drop_replaced(values: dict[str, Any], overrides: Overrides) -> None:
    """Drop the file's fields about its data source, model, algorithm or engine if an override names
    another one."""
    for path, dependent in (
        ("learner.algorithm", PARTS),
        ("rollout.engine", OF_VLLM),
        ("data.source", ("size", "options", "eval_size")),
        ("model.name", ("gguf_file",)),
    ):
        section, _, field = path.partition(".")
        fields_in_file = values.get(section)
        if not isinstance(fields_in_file, dict):
            continue
        source = fields_in_file.get(field)
        if overrides.get(path, source) == source:
            continue
        if path in ("learner.algorithm", "rollout.engine") and source is None:
            continue  # the file's fields are the user's own, not those of another algorithm
        for name in dependent:
            # `eval_source` stays, and so does its size.
            if name != "eval_size" or not fields_in_file.get("eval_source"):
                fields_in_file.pop(name, None)


def _put(values: dict[str, Any], path: str, value: Any, where: str) -> None:
    """Set the value at a dotted path, in which numbers are indices of lists."""
    *parents, last = path.split(".")
    node: Any = values
    for key in parents:
        node = (
            node.setdefault(key, {}) if isinstance(node, dict) else node[_index(node, key, where)]
        )
    node[last if isinstance(node, dict) else _index(node, last, where)] = value


def _index(node: Any, key: str, where: str) -> int:
    if not isinstance(node, list):
        raise UserError(f"{where}: {fields.brief(node)} has no part {key!r}")
    if not key.isdigit() or int(key) >= len(node):
        raise UserError(f"{where}: {key!r} is not an index of a list of {len(node)}")
    return int(key)


def _parsed(text: str, name: str) -> Any:
    """Return the value of an override: as it was typed if the field can be text, else of YAML."""
    if fields.takes_as_typed(name, text):
        return text
    return yaml.read(text, f"--{name}")[1]
