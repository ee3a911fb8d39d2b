"""Rows of a file (CSV, TSV, JSON, JSONL, Parquet) or a directory saved by Hugging Face `datasets`.

Holds true: every row read carries its place; what cannot be read is a `UserError` that names the
file and the line or row. Knows nothing of prompts: any columns will do.
"""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from types import ModuleType

from rhymeflow.data import text
from rhymeflow.data.compressed import COMPRESSIONS, inner_suffix, read_bytes
from rhymeflow.data.prompts import Row
from rhymeflow.errors import UserError
from rhymeflow.utils.extras import how_to_install

TEXT = {
    ".jsonl": text.json_lines,
    ".ndjson": text.json_lines,
    ".json": text.json_document,
    ".csv": partial(text.table, delimiter=","),
    ".tsv": partial(text.table, delimiter="\t"),
}
"""Kinds of text files, by the end of their names; each may be compressed."""

READABLE = (*TEXT, ".parquet")


def read_rows(path: Path, field: str) -> list[Row]:
    """Read all rows.

    Args:
        path: the file or directory.
        field: the configuration's field it was named in, for messages.

    Raises:
        UserError: no such file, an unknown kind of file, no rows, or a row that cannot be read.
    """
    check_source(path, field)
    kind = inner_suffix(path)
    if path.is_dir():
        rows = _saved_dataset(path, field)
    elif kind in TEXT:
        rows = TEXT[kind](read_bytes(path, field), path)
    else:
        rows = _parquet(path, field)
    if not rows:
        raise UserError(f"{field}: {path} holds no rows")
    return rows


def check_source(path: Path, field: str) -> None:
    """Look whether there is such a file of a kind that can be read; opens nothing.

    Raises:
        UserError: it is not there, or of another kind.
    """
    if not path.exists():
        is_name = str(path).count("/") == 1 and not path.suffix
        raise UserError(
            f"{field}: there is no file or directory {path}"
            + (
                "; a dataset of the Hugging Face hub is fetched with `datasets` and saved by "
                "`save_to_disk(DIR)`"
                if is_name
                else ""
            )
        )
    if path.is_dir():
        return
    is_compressed = path.suffix.lower() in COMPRESSIONS
    kind = inner_suffix(path)
    if kind not in READABLE or (is_compressed and kind not in TEXT):
        raise UserError(
            f"{field}: {path} is of an unknown kind: known are {', '.join(READABLE)}, the text "
            f"formats also with {', '.join(COMPRESSIONS)}, and directories saved by `datasets`"
        )


def extra(module: str, needed_for: str, name: str) -> ModuleType:
    """Import a module of an optional extra; `UserError` with the command if it is not there."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # the package is there, but something it needs is not
        raise UserError(
            f"{needed_for} needs the package {module}: {how_to_install(name)}"
        ) from None


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
        inside = sorted(each.name for each in split.iterdir() if inner_suffix(each) in READABLE)
        hint = f"; it holds {', '.join(inside[:3])}: name a file" if inside else ""
        raise UserError(
            f"{field}: {split} is a directory, but none that `datasets` saved (no state.json){hint}"
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
