"""Recipes: configurations `NAME.yaml`, with files in `NAME/`.

A recipe's directory may hold a checkpoint (`model.name: recipe:NAME`), a `task.py` (`data.source:
recipe:NAME`, `reward.functions[].function: recipe:NAME`, and with a class `Environment`
`environment.classes[].environment: recipe:NAME`), a `warm_start.py` with the rows that the
checkpoint was trained on (`sft.source: warm_start:NAME`), a `chat_template.jinja`, an `agent.py`.
"""

from __future__ import annotations

from pathlib import Path

from rhymeflow.errors import UserError, nearest


def file_of(spec: str, name: str) -> Path | None:
    """Return the file `name` of the recipe that `spec` names as `recipe:NAME`; None: it names none.
    Raises `UserError` if the recipe has no such file."""
    kind, _, recipe = spec.partition(":")
    if kind != "recipe":
        return None
    path = directory(recipe) / name
    if not path.is_file():
        raise UserError(f"recipe {recipe!r} ships no {name}")
    return path


def directory(name: str) -> Path:
    """Return the recipe's directory of files. Raises `UserError` if it has none."""
    path = Path(__file__).parent / name
    if not name.isidentifier() or not path.is_dir():
        known = [each.name for each in path.parent.glob("[a-z]*/")]
        raise UserError(f"recipe:{name}: there is no such recipe with files{nearest(name, known)}")
    return path
