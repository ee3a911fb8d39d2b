"""Text files: every format and compression gives the same rows; what is bad is named."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.data.files import read_rows, table
from rhymeflow.errors import UserError

ROWS = [
    {"prompt": f"{n} + 1 =\nor, as words,\t'one more'?", "answer": f'"{n + 1}"'} for n in range(5)
]


def as_table(delimiter: str) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ["prompt", "answer"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return text.getvalue()


KINDS: dict[str, Callable[[], str]] = {
    ".csv": lambda: as_table(","),
    ".tsv": lambda: as_table("\t"),
    ".json": lambda: json.dumps(ROWS, indent=1),
    "-data.json": lambda: json.dumps({"version": 1, "data": ROWS}),
    "-other.json": lambda: json.dumps({"version": [1], "train": ROWS}),
    "-lines.json": lambda: "\n".join(map(json.dumps, ROWS)),
    ".jsonl": lambda: "\n".join(map(json.dumps, ROWS)) + "\n\n",
    ".NDJSON": lambda: "\r\n".join(map(json.dumps, ROWS)),
}


def zstandard(contents: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as out:
        out.write(contents)
    return sink.getvalue().to_pybytes()


PACKERS = {
    "": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
    ".zst": zstandard,
}  # fmt: skip


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["", "byte order mark"])
def test_every_text_format_gives_the_same_rows(
    kind: str, packing: str, mark: str, tmp_path: Path
) -> None:
    path = tmp_path / f"rows{kind}{packing}"
    path.write_bytes(PACKERS[packing]((mark + KINDS[kind]()).encode()))
    rows = read_rows(path, "data.source")
    assert [row.values for row in rows] == ROWS


CELL = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=9)


@given(st.lists(st.tuples(CELL, CELL), min_size=1, max_size=6), st.sampled_from(",\t"))
def test_a_table_reads_back_and_knows_its_lines(
    cells: list[tuple[str, str]], delimiter: str
) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, quoting=csv.QUOTE_ALL)
    writer.writerow(["a", "b"])
    lines = []
    for pair in cells:
        lines.append(1 + len(text.getvalue().encode().replace(b"\r\n", b"\n").splitlines()))
        writer.writerow(pair)
    rows = table(text.getvalue().encode(), Path("x.csv"), delimiter)
    assert [tuple(row.values.values()) for row in rows] == cells
    if not any(mark in cell for pair in cells for cell in pair for mark in "\r\n"):
        assert [row.where for row in rows] == [f"x.csv:{line}" for line in lines]


MISTAKES = {
    # name, contents, what the message must hold
    "no rows": ("a.csv", b"prompt,answer\n", "a.csv holds no rows"),
    "empty": ("a.csv", b"", "a.csv holds no rows"),
    "empty list": ("a.json", b"[]", "a.json holds no rows"),
    "cells": ("a.csv", b'p,a\n"x\ny",1\n3,4,5\n', "a.csv:4: has 3 cells, and the header names 2"),
    "quote": ("a.csv", b'p,a\n1,2\n"x"y,3\n', "a.csv:3: is no CSV"),
    "open quote": ("a.csv", b'p,a\n1,2\n"x,3\n', "a.csv:3: is no CSV: unexpected end of data"),
    "semicolons": ("a.csv", b"p;a\n1;2\n", "one column called 'p;a'; columns are parted by commas"),
    "same name": ("a.csv", b"p,p\n1,2\n", "a.csv:1: two columns are called 'p'"),
    "no name": ("a.csv", b"p,\n1,2\n", "a.csv:1: column 2 has no name"),
    "messages": ("a.csv", b"p\n\"[{'role': 'user'}]\"\n", "a.csv:2: column 'p' holds a list of"),
    "latin": ("a.csv", b"p\n1\ncaf\xe9\n", "a.csv:3: no UTF-8 text (byte 3 of the line)"),
    "columns": ("a.json", b'{"p": {"0": 1}}', "should be a list of objects, one a row"),
    "two lists": ("a.json", b'{"x": [{}], "y": [{}]}', "holds several lists (x, y)"),
    "no object": ("a.json", b'[{"p": 1}, 2]', "a.json row 1: should be a JSON object, is int"),
    "broken": ("a.json", b'[{"p": 1},\n {"p"]', "a.json:2: no JSON: Expecting ':' delimiter"),
    "bad line": ("a.jsonl", b'{"p": 1}\n\n{"p"\n', "a.jsonl:3: no JSON"),
    "twice": ("a.json", b'[{"p": 1}, {"p": [{"q": 1, "q": 2}]}]', "'q' stands twice"),
    "twice above": ("a.json", b'{"x": [{"p": 1}], "x": [{"p": 2}]}', "a.json: 'x' stands twice"),
    "digits": ("a.json", b'[{"p": ' + b"9" * 6000 + b"}]", "a.json: a number has too many digits"),
    "no gzip": ("a.csv.gz", b"p\n1\n", "a.csv.gz cannot be read: Not a gzipped file"),
    "half gzip": ("a.csv.gz", gzip.compress(b"p\n1\n" * 99)[:-9], "a.csv.gz cannot be read"),
    "no xz": ("a.csv.xz", b"p\n1\n", "a.csv.xz cannot be read"),
    "no zstandard": ("a.csv.zst", b"p\n1\n", "a.csv.zst cannot be read"),
    "kind": ("a.txt", b"p\n1\n", "is of an unknown kind: known are .jsonl, .ndjson, .json, .csv"),
    "packed Parquet": ("a.parquet.gz", b"", "is of an unknown kind"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "contents", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_bad_file_is_one_line(name: str, contents: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(UserError) as error:
        read_rows(tmp_path / name, "data.source")
    assert said in str(error.value)
    assert str(tmp_path / name) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_of_files_and_a_dataset_of_the_hub_are_named_with_the_way_out(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(UserError, match=r"it holds train\.jsonl: name a file"):
        read_rows(tmp_path, "data.source")
    with pytest.raises(UserError, match=r"openai/gsm8k; a dataset of the Hugging Face hub"):
        read_rows(Path("openai/gsm8k"), "data.source")


def test_a_long_cell_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt\n" + "x" * 200_000 + "\n")
    (row,) = read_rows(tmp_path / "a.csv", "data.source")
    assert len(row.values["prompt"]) == 200_000
