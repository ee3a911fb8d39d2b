"""Generates problems: reasoning-gym's datasets, the tasks of recipes and of verifiers, and the
solved problems on which recipes' checkpoints were trained (`warm_start`).

The same name, options, seed and numbers give the same problems. The prompts of held-out problems
differ from each other and from those of all training problems.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

from rhymeflow.data.prompts import Row
from rhymeflow.errors import UserError, nearest
from rhymeflow.utils.extras import how_to_install
from rhymeflow.utils.user_values import Arguments

ATTEMPTS_PER_PROBLEM = 20
"""Problems generated per held-out one before the generator counts as exhausted."""


VERIFIERS = Path(__file__).with_name("verifiers_tasks.py")
"""Run by a Python that has verifiers, which may be another one than this."""


def is_generator(source: str) -> bool:
    """Return whether `data.source` names a generator; anything else is a path."""
    return source.startswith(("reasoning_gym:", "recipe:", "verifiers:", "warm_start:"))


def generate(
    source: str, options: dict[str, Any], seed: int, num_train: int, num_held_out: int, field: str
) -> tuple[list[Row], list[Row]]:
    """Generate training problems and distinct held-out ones; the configuration's `field` names the
    source in messages. Raises `UserError` if the generator or its options are unknown, or it has
    too few distinct problems."""
    attempts = ATTEMPTS_PER_PROBLEM * num_held_out
    kinds = {"reasoning_gym": _of_gym, "verifiers": _of_verifiers}
    make = kinds.get(source.partition(":")[0], _of_task)
    rows = make(source, options, seed, num_train, attempts, field)
    train = list(itertools.islice(rows, num_train))
    seen = {_identity(row) for row in train}
    held_out: list[Row] = []
    for row in itertools.islice(rows, attempts):
        if len(held_out) == num_held_out:
            break
        if _identity(row) not in seen:
            seen.add(_identity(row))
            held_out.append(row)
    if len(held_out) < num_held_out:
        raise UserError(
            f"{field}: {source} makes only {len(held_out)} problems besides the {num_train} to "
            f"train on, and {num_held_out} are to be held out: lower data.size or "
            "data.eval_size, or widen data.options"
        )
    return train, held_out


def task_module(name: str, field: str) -> ModuleType:
    """Import a recipe's task, `recipes/NAME/task.py` or `recipes/NAME.py`. Raises `UserError`."""
    what = f"task (recipes/{name}/task.py)"
    return _of_recipe(name, field, (f"{name}.task", name), "problems", what)


def _of_recipe(
    name: str, field: str, modules: tuple[str, ...], function: str, what: str
) -> ModuleType:
    """Import the first of `modules` that has `function`, which a `UserError` calls `what`."""
    if not name.isidentifier():
        raise UserError(f"{field}: {name!r} is no name of a recipe")
    for module in (f"rhymeflow.recipes.{each}" for each in modules):
        try:
            imported = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                raise  # a dependency of the module is missing
            continue
        if hasattr(imported, function):
            return imported
    raise UserError(f"{field}: the recipe {name!r} has no {what}")


def reasoning_gym(needed_for: str) -> ModuleType:
    """Import reasoning-gym, also without pycosat, whose installation needs a C compiler: the only
    dataset that uses it, one of a hundred, is then refused. Raises `UserError`."""
    if "pycosat" not in sys.modules and importlib.util.find_spec("pycosat") is None:
        sys.modules["pycosat"] = ModuleType("pycosat")
    try:
        return importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        raise UserError(
            f"{needed_for} needs the package {error.name}: {how_to_install('reasoning')}"
        ) from None


def derived_seed(*parts: object) -> int:
    """Return a seed below 2**31 that differs between nearby inputs."""
    return xxhash.xxh3_64_intdigest(repr(parts).encode()) >> 33


def exact_entry(item: dict[str, Any]) -> str | None:
    """Write a reasoning-gym item as Python literals; None if it holds values that have none. JSON
    would turn tuples into lists and numeric keys into text, which its scorers distinguish."""
    text = repr(_builtin(item))
    try:
        same = ast.literal_eval(text) == item
    except (ValueError, SyntaxError):
        return None
    return text if same else None


def _of_gym(
    source: str, options: dict[str, Any], seed: int, num_train: int, attempts: int, field: str
) -> Iterator[Row]:
    name = source.partition(":")[2]
    dataset = _gym_dataset(name, options, seed, num_train + attempts, field)
    for index in range(len(dataset)):
        item, where = dataset[index], f"{source} item {index}"
        entry = exact_entry(item)
        if entry is None:
            raise UserError(f"{where}: holds values that cannot be passed to its scorer")
        columns = {"answer": item["answer"], "data_source": source, "entry": entry}
        yield Row(where, {"prompt": item["question"], **columns})


def _of_verifiers(
    source: str, options: dict[str, Any], seed: int, num_train: int, attempts: int, field: str
) -> Iterator[Row]:
    name, where = source.partition(":")[2], f"{field}: {source}"
    python = options.get("python", sys.executable)
    options = {key: value for key, value in options.items() if key != "python"}
    arguments = [python, str(VERIFIERS), name, str(num_train + attempts), json.dumps(options)]
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(f"data.options: python: {python}: {error.strerror}") from None
    if done.returncode != 0:
        why = (done.stderr.strip() or "it says nothing").splitlines()[-1]
        if "No module named 'verifiers'" in why:
            why = (
                f"{python} has no verifiers: {how_to_install('verifiers')}, or name a Python that "
                "has it as data.options.python and environment.agent_python"
            )
        raise UserError(f"{where}: {why}")
    rows = done.stdout.splitlines()
    if len(rows) < num_train:
        raise UserError(f"{where} has {len(rows)} tasks, and data.size = {num_train}")
    for index, row in enumerate(rows):
        yield Row(f"{source} task {index}", json.loads(row))


def _gym_dataset(name: str, options: dict[str, Any], seed: int, size: int, field: str) -> Any:
    gym = reasoning_gym(f"{field}: reasoning_gym:{name}")
    known = importlib.import_module("reasoning_gym.factory").DATASETS
    if name not in known:
        raise UserError(f"{field}: reasoning-gym has no dataset {name!r}{nearest(name, known)}")
    allowed = {each.name for each in dataclasses.fields(known[name][1])} - {"size"}
    for option in options:
        if option not in allowed:
            raise UserError(
                f"data.options: reasoning_gym:{name} has no option {option!r}"
                f"{nearest(option, allowed)}"
            )
    has_pycosat = hasattr(sys.modules["pycosat"], "itersolve")
    if "zebra_puzzles" in repr((name, options)) and not has_pycosat:  # also inside composite
        raise UserError(
            "reasoning_gym:zebra_puzzles needs the package pycosat, which is compiled when it is "
            "installed: pip install pycosat"
        )
    arguments = {"seed": derived_seed("reasoning_gym", seed)} | options
    if name == "composite":
        arguments["datasets"] = _composite_parts(options.get("datasets"))
    try:
        return gym.create_dataset(name, size=size, **arguments)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(
            f"data.options: reasoning_gym:{name} refuses {options}: {error or 'no reason given'}"
        ) from None


def _composite_parts(parts: Any) -> list[Any]:
    composite = importlib.import_module("reasoning_gym.composite")
    try:
        return [composite.DatasetSpec(**{"weight": 1.0, "config": {}} | each) for each in parts]
    except TypeError:
        raise UserError(
            "data.options: reasoning_gym:composite needs `datasets`, a list of "
            "{name: ..., weight: ..., config: {...}}"
        ) from None


def _of_task(
    source: str, options: dict[str, Any], seed: int, num_train: int, attempts: int, field: str
) -> Iterator[Row]:
    kind, _, name = source.partition(":")
    if kind == "recipe":
        make = task_module(name, field).problems
    else:
        what = f"rows (recipes/{name}/warm_start.py)"
        make = _of_recipe(name, field, (f"{name}.warm_start",), "rows", what).rows
    arguments = Arguments(make)
    arguments.names = arguments.names[2:]  # options come after count and seed
    arguments.check_options(options, f"data.options: {source}")
    # Separate calls: a task's longer list need not begin with its shorter one.
    calls = [(num_train, seed)] if num_train else []
    held_out = attempts // ATTEMPTS_PER_PROBLEM
    calls += [(held_out, derived_seed("held out", seed, n)) for n in range(ATTEMPTS_PER_PROBLEM)]
    for count, call_seed in calls:
        try:
            problems = make(count, call_seed, **options)
        except (TypeError, ValueError) as error:
            raise UserError(f"data.options: {source} refuses {options}: {error}") from None
        assert len(problems) == count, f"{source} made {len(problems)} of {count} problems"
        for index, problem in enumerate(problems):
            yield Row(f"{source} problem {index} of seed {call_seed}", problem)


def _identity(row: Row) -> str:
    return repr(row.values.get("prompt"))


def _builtin(value: Any) -> Any:
    """Replace NumPy scalars, which some items hold, by Python's."""
    if isinstance(value, dict):
        return {_builtin(key): _builtin(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_builtin(each) for each in value]
    if type(value) is tuple:
        return tuple(_builtin(each) for each in value)
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        return value.item()
    return value
