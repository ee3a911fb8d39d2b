"""Reads rows of a CSV, TSV, JSON, JSONL or Parquet file, or of a directory saved by `datasets`.

Each row says where it is: its line, or its number from 0. Values of CSV and TSV are text."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rhymeflow.data.prompts import Row
from rhymeflow.errors import UserError
from rhymeflow.utils.user_values import shown

LONGEST_CELL = 2**31 - 1  # most characters in a CSV cell; Python's default is 131,072

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")


def read_rows(path: Path, field: str) -> list[Row]:
    """Read all rows, at least one; the configuration's `field` names the path. Raises `UserError`
    if it cannot be read, or has no rows."""
    check_source(path, field)
    kind = _kind(path)
    if path.is_dir():
        rows = _saved_dataset(path, field)
    elif kind in TEXT:
        rows = TEXT[kind](_read_bytes(path, field), path)
    else:
        rows = _parquet(path, field)
    if not rows:
        raise UserError(f"{field}: {path} holds no rows")
    return rows


def check_source(path: Path, field: str) -> None:
    """Raise `UserError` unless the path exists and is of a known kind, without opening it."""
    if not path.exists():
        hint = ""
        if "," in str(path):
            hint = "; one file is read: join several into one"
        elif str(path).count("/") == 1 and not path.suffix:
            hint = "; a dataset of the Hugging Face hub is fetched with `datasets` and saved by "
            hint += "`save_to_disk(DIR)`"
        raise UserError(f"{field}: there is no file or directory {path}{hint}")
    if path.is_dir():
        return
    is_compressed = path.suffix.lower() in COMPRESSIONS
    if _kind(path) not in READABLE or (is_compressed and _kind(path) not in TEXT):
        raise UserError(
            f"{field}: {path} is of an unknown kind: known are {', '.join(READABLE)}, the text "
            f"formats also with {', '.join(COMPRESSIONS)}, and directories saved by `datasets`"
        )


def _kind(path: Path) -> str:
    """Return the suffix in lower case: `.jsonl` for `a.jsonl` and for `A.JSONL.gz`."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSIONS else suffix


def _read_bytes(path: Path, field: str) -> bytes:
    suffix, openers = path.suffix.lower(), {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    opener: Any = openers.get(suffix, partial(open, mode="rb"))
    if suffix == ".zst":
        import pyarrow  # slow to import, as its users below

        opener = partial(pyarrow.input_stream, compression="zstd")
    try:
        with opener(str(path)) as file:
            return file.read()
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        what = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UserError(f"{field}: {path} cannot be read: {what}") from None


# -- JSON ------------------------------------------------------------------------------------------


def _json_lines(contents: bytes, path: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(contents.split(b"\n"), start=1):
        if line.strip():
            where = f"{path}:{number}"
            rows.append(_row(where, _parsed(_decoded(line.strip(), where), where)))
    return rows


def _json_document(contents: bytes, path: Path) -> list[Row]:
    """Parse a JSON list of objects, or an object that holds one, such as `{"data": [...]}`."""
    text = _decoded(contents, str(path))
    try:
        value = _parsed(text, str(path), is_document=True)
    except UserError as error:
        if "Extra data" in str(error) and text.lstrip().startswith("{"):
            return _json_lines(contents, path)  # JSON Lines are often named .json
        raise
    return [_row(f"{path} row {n}", each) for n, each in enumerate(_list_of_rows(value, path))]


def _list_of_rows(value: Any, path: Path) -> list[Any]:
    """Return the document if it is a list, else its list `data`, or its only list of objects."""
    if isinstance(value, list):
        return value
    lists: dict[str, list[Any]] = {}
    for name, each in value.items() if isinstance(value, dict) else ():
        if isinstance(each, list) and all(isinstance(row, dict) for row in each):
            lists[name] = each
    if "data" in lists or len(lists) == 1:
        return lists.get("data") or next(iter(lists.values()))
    problem = f"but holds several ({', '.join(lists)})" if lists else f"is {shown(value)}"
    raise UserError(
        f"{path}: should be a list of objects, one a row, or an object that holds one such list "
        f'(as {{"data": [...]}}), {problem}'
    )


def _row(where: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise UserError(f"{where}: should be a JSON object, is {shown(value)}")
    return Row(where, value)


def _parsed(text: str, where: str, is_document: bool = False) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except json.JSONDecodeError as error:
        line = f":{error.lineno}" if is_document else ""
        raise UserError(f"{where}{line}: no JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError):
        raise UserError(
            f"{where}: JSON nested too deeply, or a number with too many digits (give it as text)"
        ) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        name = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{name!r} stands twice in an object")
    return values


def _decoded(contents: bytes, where: str) -> str:
    try:
        return contents.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = contents[: error.start]
        if line := before.count(b"\n"):
            where, before = f"{where}:{line + 1}", before.rpartition(b"\n")[2]
        raise UserError(f"{where}: no UTF-8 text (byte {len(before)} of the line)") from None


# -- tables ----------------------------------------------------------------------------------------


def table(contents: bytes, path: Path, delimiter: str) -> list[Row]:
    """Parse CSV or TSV, whose first line names the columns. Raises `UserError`."""
    csv.field_size_limit(LONGEST_CELL)
    text = io.StringIO(_decoded(contents, str(path)), newline="")
    lines = _table_lines(csv.reader(text, delimiter=delimiter, strict=True), path)
    where, names = next(lines, (f"{path}:1", []))
    _check_header(names, where, delimiter)
    rows = []
    for where, cells in lines:
        if len(cells) != len(names):
            raise UserError(
                f"{where}: has {len(cells)} cells, and the header names {len(names)} columns "
                "(a cell that holds a separator or a line break needs double quotes)"
            )
        for name, cell in zip(names, cells, strict=True):
            if cell.lstrip().startswith(('[{"role"', "[{'role'", '[{"content"', "[{'content'")):
                raise UserError(
                    f"{where}: column {name!r} holds a list of messages as text; cells of CSV are "
                    "plain text: give messages as JSONL"
                )
        rows.append(Row(where, dict(zip(names, cells, strict=True))))
    return rows


def _table_lines(reader: Any, path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each row that is not empty, with the file and line where it begins."""
    where = f"{path}:1"
    try:
        for cells in reader:
            if cells:
                yield where, cells
            where = f"{path}:{reader.line_num + 1}"
    except csv.Error as error:
        raise UserError(f"{where}: is no CSV: {error}") from None


def _check_header(names: list[str], where: str, delimiter: str) -> None:
    for index, name in enumerate(names):
        if not name.strip():
            raise UserError(f"{where}: column {index + 1} has no name")
        if name in names[:index]:
            raise UserError(f"{where}: two columns are called {name!r}")
    if len(names) == 1 and any(mark in names[0] for mark in ";\t,"):
        comma = "commas (.tsv: tabs)" if delimiter == "," else "tabs (.csv: commas)"
        raise UserError(f"{where}: one column called {names[0]!r}; columns are split by {comma}")


TEXT: dict[str, Callable[..., list[Row]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_document,
    ".csv": partial(table, delimiter=","),
    ".tsv": partial(table, delimiter="\t"),
}
"""Parsers of text files by suffix; each may be compressed."""

READABLE = (*TEXT, ".parquet")


# -- Arrow -----------------------------------------------------------------------------------------


def _parquet(path: Path, field: str) -> list[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        return _numbered(path, parquet.read_table(path).to_pylist())
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{field}: {path}: no readable Parquet file: {_first_line(error)}"
        ) from None


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
        inside = sorted(each.name for each in split.iterdir() if _kind(each) in READABLE)
        hint = f"; it holds {', '.join(inside[:3])}: name a file" if inside else ""
        raise UserError(
            f"{field}: {split} is a directory, but none that `datasets` saved (no state.json){hint}"
        )
    import datasets

    try:
        # No format: a dataset saved with one would hand out arrays.
        return _numbered(split, datasets.load_from_disk(str(split)).with_format(None))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{field}: {split} cannot be read: {_first_line(error)}") from None


def _numbered(path: Path, rows: Iterable[Any]) -> list[Row]:
    return [Row(f"{path} row {index}", dict(row)) for index, row in enumerate(rows)]


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
