"""Rows of a file: JSONL, Parquet, or a directory saved by Hugging Face `datasets`.

Holds true: every row read carries its place; what cannot be read is a `UserError` that names the
file and the line or row. Knows nothing of prompts: any columns will do.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

from rhymeflow.data.prompts import Row
from rhymeflow.errors import UserError

READABLE = (".jsonl", ".parquet")


def read_rows(path: Path, field: str) -> list[Row]:
    """Read all rows.

    Args:
        path: the file or directory.
        field: the configuration's field it was named in, for messages.

    Raises:
        UserError: no such file, an unknown kind of file, no rows, or a row that cannot be read.
    """
    if not path.exists():
        raise UserError(f"{field}: there is no file or directory {path}")
    if path.is_dir():
        rows = _saved_dataset(path, field)
    elif path.suffix == ".jsonl":
        rows = _jsonl(path)
    elif path.suffix == ".parquet":
        rows = _parquet(path, field)
    else:
        raise UserError(
            f"{field}: {path} is of an unknown kind: known are {', '.join(READABLE)} and "
            "directories saved by `datasets`"
        )
    if not rows:
        raise UserError(f"{field}: {path} holds no rows")
    return rows


def extra(module: str, needed_for: str, name: str) -> ModuleType:
    """Import a module of an optional extra; `UserError` with the command if it is not there."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # the package is there, but something it needs is not
        raise UserError(
            f"{needed_for} needs the package {module}: pip install 'rhymeflow[{name}]'"
        ) from None


def _jsonl(path: Path) -> list[Row]:
    rows = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}:{number}"
                rows.append(Row(where, _json_object(line, where)))
    return rows


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line.rstrip().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: no UTF-8 text (byte {error.start} of the line)") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: no JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise UserError(f"{where}: JSON nested too deeply") from None
    if not isinstance(value, dict):
        raise UserError(f"{where}: should be a JSON object, is {type(value).__name__}")
    return value


def _parquet(path: Path, field: str) -> list[Row]:
    needed_for = f"{field}: {path}: reading Parquet"
    pyarrow = extra("pyarrow", needed_for, "data")
    parquet = extra("pyarrow.parquet", needed_for, "data")
    try:
        table = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{field}: {path}: no readable Parquet file: {_first_line(error)}"
        ) from None
    return [Row(f"{path} row {index}", row) for index, row in enumerate(table.to_pylist())]


def _saved_dataset(path: Path, field: str) -> list[Row]:
    split = path
    if (path / "dataset_dict.json").is_file():
        split = path / "train"
        if not split.is_dir():
            splits = sorted(each.name for each in path.iterdir() if each.is_dir())
            raise UserError(
                f"{field}: {path} has no split 'train'; name one of its directories: "
                f"{', '.join(splits) or 'there are none'}"
            )
    if not (split / "state.json").is_file():
        raise UserError(
            f"{field}: {split} is a directory, but none that `datasets` saved (no state.json)"
        )
    datasets = extra("datasets", f"{field}: {path}: a saved dataset", "data")
    try:
        dataset = datasets.load_from_disk(str(split))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{field}: {split} cannot be read: {_first_line(error)}") from None
    # No format: a dataset saved with one would hand out arrays.
    rows = dataset.with_format(None)
    return [Row(f"{split} row {index}", dict(row)) for index, row in enumerate(rows)]


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
