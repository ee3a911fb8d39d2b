"""Rows of text files: JSON lines, JSON, CSV and TSV.

Holds true: every row carries its line (of a JSON document: its number, from 0); a row that cannot
be read is a `UserError` that names its place. Values of CSV and TSV are text.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rhymeflow.data.prompts import Row
from rhymeflow.errors import UserError

LONGEST_CELL = 2**31 - 1
"""Characters of a cell of CSV; Python's own limit is 131,072."""


def json_lines(contents: bytes, path: Path) -> list[Row]:
    """Rows of a file with one JSON object a line; empty lines are skipped."""
    rows = []
    for number, line in enumerate(contents.split(b"\n"), start=1):
        if line.strip():
            where = f"{path}:{number}"
            rows.append(Row(where, _object(_parsed(line.strip(), where), where)))
    return rows


def json_document(contents: bytes, path: Path) -> list[Row]:
    """Rows of a JSON list of objects, or of an object that holds one, such as `{"data": [...]}`."""
    text = _decoded(contents, str(path))
    try:
        value, twice = _loaded(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            return json_lines(contents, path)  # many name JSON lines .json
        raise _not_json(error, f"{path}:{error.lineno}") from None
    except (RecursionError, ValueError) as error:
        raise _unreadable(error, str(path)) from None
    rows = _list_of_rows(value, path)
    if twice:
        raise _given_twice(twice[0], rows, path)
    return [Row(f"{path} row {n}", _object(each, f"{path} row {n}")) for n, each in enumerate(rows)]


def table(contents: bytes, path: Path, delimiter: str) -> list[Row]:
    """Rows of CSV or TSV, whose first line names the columns."""
    csv.field_size_limit(LONGEST_CELL)
    text = _decoded(contents, str(path))
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    lines = _table_lines(reader, path)
    number, names = next(lines, (1, []))
    _check_header(names, f"{path}:{number}", delimiter)
    rows = []
    for number, cells in lines:
        where = f"{path}:{number}"
        if len(cells) != len(names):
            raise UserError(
                f"{where}: has {len(cells)} cells, and the header names {len(names)} columns "
                "(a cell that holds a separator or a line break stands in double quotes)"
            )
        values = dict(zip(names, cells, strict=True))
        for name, cell in values.items():
            if cell.lstrip().startswith(('[{"role"', "[{'role'", '[{"content"', "[{'content'")):
                raise UserError(
                    f"{where}: column {name!r} holds a list of messages as text; cells of CSV are "
                    "plain text: give messages as JSONL"
                )
        rows.append(Row(where, values))
    return rows


def _table_lines(reader: Any, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Each row that is not empty, with the line it begins on."""
    while True:
        begins = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise UserError(f"{path}:{begins}: is no CSV: {error}") from None
        if cells:
            yield begins, cells


def _check_header(names: list[str], where: str, delimiter: str) -> None:
    for index, name in enumerate(names):
        if not name.strip():
            raise UserError(f"{where}: column {index + 1} has no name")
        if name in names[:index]:
            raise UserError(f"{where}: two columns are called {name!r}")
    if len(names) == 1 and any(mark in names[0] for mark in ";\t,"):
        comma = "commas (.tsv: tabs)" if delimiter == "," else "tabs (.csv: commas)"
        raise UserError(f"{where}: one column called {names[0]!r}; columns are parted by {comma}")


def _list_of_rows(value: Any, path: Path) -> list[Any]:
    if isinstance(value, list):
        return value
    if isinstance(value, dict):
        lists = {name: each for name, each in value.items() if _holds_rows(each)}
        if "data" in lists or len(lists) == 1:
            return lists.get("data") or next(iter(lists.values()))  # type: ignore[no-any-return]
        if len(lists) > 1:
            raise UserError(
                f"{path}: holds several lists ({', '.join(lists)}); write one to a file of its own"
            )
    raise UserError(
        f"{path}: should be a list of objects, one a row, or an object that holds such a list "
        f'(as {{"data": [...]}}), is {_kind(value)}'
    )


def _holds_rows(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where}: should be a JSON object, is {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return f"an object of {', '.join(map(repr, list(value)[:5])) or 'nothing'}"
    return type(value).__name__


def _parsed(line: bytes, where: str) -> Any:
    try:
        value, twice = _loaded(_decoded(line, where))
    except json.JSONDecodeError as error:
        raise _not_json(error, where) from None
    except (RecursionError, ValueError) as error:
        raise _unreadable(error, where) from None
    if twice:
        raise UserError(f"{where}: {twice[0].key!r} stands twice")
    return value


class _Twice(dict[str, Any]):
    """An object of JSON in which the name `key` stands twice."""

    key: str


def _loaded(text: str) -> tuple[Any, list[_Twice]]:
    """The value, and those objects in it in which a name stands twice, innermost first."""
    twice: list[_Twice] = []

    def made(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) == len(pairs):
            return values
        marked = _Twice(values)
        names = [name for name, _ in pairs]
        marked.key = next(name for name in values if names.count(name) > 1)
        twice.append(marked)
        return marked

    return json.loads(text, object_pairs_hook=made), twice


def _given_twice(found: _Twice, rows: list[Any], path: Path) -> UserError:
    """What is said of an object of a document, with the row that it is in."""

    def holds(value: Any) -> bool:
        inside = value.values() if isinstance(value, dict) else value
        return value is found or (
            isinstance(value, dict | list) and any(holds(each) for each in inside)
        )

    row = next((f" row {n}" for n, each in enumerate(rows) if holds(each)), "")
    return UserError(f"{path}{row}: {found.key!r} stands twice")


def _unreadable(error: Exception, where: str) -> UserError:
    if isinstance(error, UserError):
        return error
    if isinstance(error, RecursionError):
        return UserError(f"{where}: JSON nested too deeply")
    return UserError(f"{where}: a number has too many digits to be read; give it as text")


def _decoded(contents: bytes, where: str) -> str:
    try:
        return contents.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = contents[: error.start]
        line = before.count(b"\n")
        if line:
            where, before = f"{where}:{line + 1}", before.rpartition(b"\n")[2]
        raise UserError(f"{where}: no UTF-8 text (byte {len(before)} of the line)") from None


def _not_json(error: json.JSONDecodeError, where: str) -> UserError:
    return UserError(f"{where}: no JSON: {error.msg} at column {error.colno}")
