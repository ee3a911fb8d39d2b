"""Writes rows as JSON lines, Parquet, or a directory that `datasets.load_from_disk` reads.

The output appears only when it is complete; only some rows at a time are held in memory. In Parquet
and datasets a column has one type: the data's columns are JSON text, and each reward component is a
field."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from rhymeflow.errors import UserError
from rhymeflow.observe.query import Record

FORMATS = ("jsonl", "parquet", "datasets")
_ROWS_AT_ONCE = 1024
_VALUES_AT_ONCE = 500_000  # most characters and tokens of the rows that are held at once

_TEXTS = ("prompt", "completion", "chosen", "rejected")  # columns of text or messages


def format_of(path: Path, kind: str | None, force: bool) -> str:
    """Return the format to write to `path`: `kind`, or else that of its suffix. Raises `UserError`
    if the suffix has none, or `path` exists and must not be replaced."""
    kind = kind or {".jsonl": "jsonl", ".parquet": "parquet"}.get(path.suffix)
    if kind is None:
        raise UserError(f"--output {path}: say --format {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise UserError(f"--output {path}: there is no directory {path.parent}")
    if path.exists() and not force:
        raise UserError(f"--output {path}: is there already; --force replaces it")
    if path.is_dir() and (kind != "datasets" or not (path / "state.json").is_file()):
        raise UserError(f"--output {path}: is a directory, and no {kind} that could be replaced")
    return kind


def write(
    path: Path, kind: str, rows: Iterator[Record], components: Sequence[str], where: str
) -> int:
    """Write rows in the format `kind` to `path`, over an existing output; return how many. Without
    rows, write nothing. `components`: names of the reward's components. `where` names the run in
    messages. Raises `UserError` if a package is missing, or a row does not fit the format."""
    first = next(rows, None)
    if first is None:
        return 0
    unfinished = path.with_name(f"{path.name}.unfinished")
    all_rows = chain([first], rows)
    try:
        if kind == "jsonl":
            number = _write_json(unfinished, all_rows)
        else:
            number = _Tables(kind, components, where).write(unfinished, first, all_rows)
        if path.is_dir():
            shutil.rmtree(path)
        unfinished.replace(path)
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written: {error}") from error
    finally:
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        unfinished.unlink(missing_ok=True)
    return number


def _write_json(path: Path, rows: Iterable[Record]) -> int:
    number = 0
    with path.open("wb") as file:
        for row in rows:
            file.write(msgspec.json.encode(row) + b"\n")
            number += 1
    return number


class _Tables:
    """Writes rows through Arrow, as Parquet or as a saved dataset."""

    def __init__(self, kind: str, components: Sequence[str], where: str) -> None:
        import pyarrow  # slow

        self._pa: Any = pyarrow
        self._kind, self._components, self._where = kind, components, where

    def write(self, path: Path, first: Record, rows: Iterable[Record]) -> int:
        """Write rows to `path`; return how many. `first`, the first of them, gives the types."""
        schema = self._schema(first)
        if self._kind == "parquet":
            from pyarrow import parquet

            with parquet.ParquetWriter(path, schema) as writer:
                return self._fill(writer, rows, schema)
        import datasets

        arrow = path.with_name(f"{path.name}.arrow")
        try:
            with self._pa.ipc.new_stream(str(arrow), schema) as writer:
                number = self._fill(writer, rows, schema)
            datasets.disable_progress_bars()
            datasets.Dataset.from_file(str(arrow)).save_to_disk(str(path))
            return number
        finally:
            arrow.unlink(missing_ok=True)

    def _fill(self, writer: Any, rows: Iterable[Record], schema: Any) -> int:
        number = 0
        for part in _parts(self._plain(row, schema) for row in rows):
            writer.write_batch(self._pa.RecordBatch.from_pylist(part, schema=schema))
            number += len(part)
        return number

    def _schema(self, first: Record) -> Any:
        pa = self._pa
        text, number = pa.string(), pa.float64()
        of_text = ("response", "columns", "ending", "ending_reason", "reason")
        turn = pa.struct([("role", text), ("text", text), ("length", pa.int64())])
        messages = pa.list_(pa.struct([("role", text), ("content", text)]))
        types = {
            **dict.fromkeys(of_text, text),
            **{name: text if isinstance(first.get(name), str) else messages for name in _TEXTS},
            **dict.fromkeys(("reward", "chosen_reward", "rejected_reward"), number),
            **dict.fromkeys(("prompt_tokens", "tokens", "versions"), pa.list_(pa.int32())),
            "logprobs": pa.list_(pa.float32()),
            "observed": pa.list_(pa.bool_()),
            "components": pa.struct([(name, number) for name in self._components]),
            "turns": pa.list_(turn),
        }
        # Parquet has no structure without fields.
        names = [name for name in first if name != "components" or self._components]
        return pa.schema([(name, types.get(name, pa.int64())) for name in names])

    def _plain(self, row: Record, schema: Any) -> Record:
        for name in row.keys() & set(_TEXTS):
            self._check(name, row[name], schema.field(name).type == self._pa.string())
        if new := (row.get("components") or {}).keys() - set(self._components):
            raise UserError(
                f"{self._where}: the reward has a new component {min(new)!r}; export again"
            )
        if "columns" in row:
            return row | {"columns": json.dumps(row["columns"], ensure_ascii=False)}
        return row

    def _check(self, name: str, value: Any, is_text: bool) -> None:
        if isinstance(value, str) != is_text:
            raise UserError(
                f"{self._where}: column {name!r} is text in some rows, messages in others, which "
                f"--format {self._kind} does not hold; jsonl does"
            )
        for message in () if is_text else value:
            if more := message.keys() - {"role", "content"}:
                raise UserError(
                    f"{self._where}: messages of column {name!r} have {min(more)!r} besides role "
                    f"and content, for which --format {self._kind} has no place; jsonl has"
                )


def _parts(rows: Iterable[Record]) -> Iterator[list[Record]]:
    """Split rows into parts that fit in memory."""
    part: list[Record] = []
    size = 0
    for row in rows:
        part.append(row)
        size += sum(len(value) for value in row.values() if isinstance(value, str | list))
        if len(part) == _ROWS_AT_ONCE or size >= _VALUES_AT_ONCE:
            yield part
            part, size = [], 0
    if part:
        yield part
