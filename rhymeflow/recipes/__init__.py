"""Recipes: configurations `NAME.yaml`, with files in `NAME/`.

A recipe's directory may hold a checkpoint (`model.name: recipe:NAME`), a `task.py` (`data.source:
recipe:NAME`, `reward.functions[].function: recipe:NAME`, and with a class `Environment`
`environment.classes[].environment: recipe:NAME`) and a `warm_start.py` with the rows that the
checkpoint was trained on (`sft.source: warm_start:NAME`).
"""

from __future__ import annotations

from pathlib import Path

from rhymeflow.errors import UserError


def directory(name: str) -> Path:
    """Return the recipe's directory of files. Raises `UserError` if it has none."""
    path = Path(__file__).parent / name
    if not name.isidentifier() or not path.is_dir():
        raise UserError(f"recipe {name!r} ships no files (there is no directory {path})")
    return path
