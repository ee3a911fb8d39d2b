"""Prompts from files of every format: what is read, held out, and said of bad files."""

import bz2
import csv
import gzip
import io
import json
import lzma
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.config import DataConfig
from rhymeflow.data.files import read_rows, table
from rhymeflow.data.load import load_prompts
from rhymeflow.data.prompts import Prompt
from tests.refused import refusal

ROWS = [{"prompt": f"{n} + 1 =", "answer": str(n + 1), "level": n % 3} for n in range(10)]


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def load(source: str, **fields: Any) -> tuple[list[Prompt], list[Prompt]]:
    return load_prompts(DataConfig(source=source, **({"eval_size": 0} | fields)), seed=0)


def refused(source: str, **fields: Any) -> str:
    return refusal(load, source, **fields)


def texts(prompts: list[Prompt]) -> list[Any]:
    return [each.prompt for each in prompts]


def test_what_is_trained_on_and_held_out(tmp_path):
    """The first rows and the last, with their places; empty lines are none."""
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n".join(map(json.dumps, ROWS)))
    train, held_out = load(str(path), eval_size=3)
    assert texts(train) + texts(held_out) == [row["prompt"] for row in ROWS]
    assert (train[4].row, train[4].columns) == (4, {"answer": "5", "level": 1})
    assert (held_out[2].row, held_out[2].where) == (2, f"{path}:19")
    train, held_out = load(str(path), size=1, eval_size=1, prompt_column="answer")
    assert (texts(train), texts(held_out)) == (["1"], ["10"])
    assert train[0].columns == {"prompt": "0 + 1 =", "level": 0}


def test_verl_rows_give_ground_truth_as_a_column(tmp_path):
    columns = {
        "data_source": "gsm8k",
        "ability": "math",
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "extra_info": {"index": 0, "split": "train"},
    }
    row = columns | {"prompt": [{"role": "user", "content": "1+1", "name": None}]}
    train, _ = load(parquet(tmp_path / "a.parquet", [row]))
    assert train[0].prompt == [{"role": "user", "content": "1+1"}]
    assert train[0].columns == columns | {"ground_truth": "2"}
    contradiction = jsonl(tmp_path / "b.jsonl", [row | {"ground_truth": "3"}])
    assert "'ground_truth' and 'reward_model.ground_truth' differ" in refused(contradiction)
    of_skyrl = {"prompt": "1+1", "reward_spec": {"method": "rule", "ground_truth": "2"}}
    train, _ = load(jsonl(tmp_path / "c.jsonl", [of_skyrl | {"images": []}]))
    assert train[0].columns["ground_truth"] == "2"
    shown = jsonl(tmp_path / "d.jsonl", [of_skyrl | {"images": [{"path": "a.png"}]}])
    assert "d.jsonl:1: column 'images' holds list [{'path': 'a.png'}], and the" in refused(shown)


def test_parts_with_text_are_the_text_of_a_message(tmp_path):
    parts = [{"type": "text", "text": "1+1"}, {"type": "text", "text": "="}]
    row = {"prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": parts}]}
    train, _ = load(jsonl(tmp_path / "a.jsonl", [row]))
    assert [each["content"] for each in train[0].prompt] == ["Add.", "1+1\n="]
    row = {"prompt": [{"role": "user", "content": [{**parts[0], "image": None}]}]}
    train, _ = load(parquet(tmp_path / "b.parquet", [row]))
    assert train[0].prompt == [{"role": "user", "content": "1+1"}]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "a"', "no JSON: Expecting ',' delimiter at column 15"),
        ('["prompt"]', "should be a JSON object, is list"),
        ('{"promt": "a"}', "no column 'prompt'; data.prompt_column names the one that"),
        ('{"prompt": 3}', "should be a string or a list of messages, is int 3"),
        ('{"prompt": ""}', "the prompt is empty"),
        ('{"prompt": []}', "the list of messages is empty"),
        ('{"prompt": ["hello"]}', "message 0: should be {"),
        ('{"prompt": [{"role": "user"}]}', "message 0: has no 'content'"),
        ('{"prompt": [{"role": "user", "content": [1]}]}', "'content' should be text"),
        ('{"prompt": [{"role": "user", "content": []}]}', "'content' should be text, is list"),
        ('{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}', "reads text only"),
        (
            '{"prompt": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}]}',
            "has dict {'type': 'text', 'text': 'a', 'b': 1}",
        ),
        ('{"prompt": "a", "completions": 1}', "column 'completions' has the name of an argument"),
        ('{"prompt": "a", "n": 99999999999999999999}', "has more than 64 bits"),
        ('{"prompt": "a", "n": ' + "9" * 6000 + "}", "a number with too many digits (give it"),
        ('{"prompt": "a", "n": NaN}', "column 'n': holds nan; null stands for"),
        ('{"prompt": "a", "n": {"m": [1e999]}}', "column 'n': holds inf; null stands for"),
        ('{"prompt": "a", "n": [{"m": 1, "m": 1}]}', "'m' stands twice"),
        ('{"prompt": "\\ud800"}', "half of a surrogate pair"),
        ('{"prompt": "a", "\\ud800": 1}', r"the name '\ud800' of a column: holds half of a sur"),
        ('{"prompt": "a", "b": [{"\\ud800": 1}]}', r"column 'b': the key '\ud800' of a mapping"),
        ('{"prompt": [{"role": "user", "content": "a", "\\ud800": 1}]}', "message 0: the key"),
        ('{"prompt": "a", "b": {"c": "\\ud800"}}', "column 'b': holds half of a surrogate pair"),
        ("[" * 100_000, "JSON"),
    ],
)
def test_a_bad_line_is_named(line, said, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n\n' + line)
    message = refused(str(path))
    assert message.startswith(f"{path}:3: ")
    assert said in message


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"n": 1.0}, {"n": None}, {"n": math.nan}], "row 2: column 'n': holds nan"),
        ([{"made": {"of": None}}, {"made": {"of": b"x"}}], "row 1: column 'made': holds bytes"),
    ],
)
def test_what_rewards_cannot_be_given_is_named_in_parquet(rows, said, tmp_path):
    source = parquet(tmp_path / "a.parquet", [{"prompt": "a"} | row for row in rows])
    assert refused(source).startswith(f"{source} {said}")


def test_directories_and_names_are_told_with_the_way_out(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/train.jsonl").write_text("{}")
    DatasetDict(test=Dataset.from_list(ROWS)).save_to_disk(tmp_path / "splits")
    for source, said in {
        f"{tmp_path}/missing.jsonl": "there is no file or directory",
        "['a.parquet', 'b.parquet']": "'b.parquet']; one file is read: join several into one",
        f"{tmp_path}/folder": "none that `datasets` saved (no state.json); it holds train.jsonl",
        f"{tmp_path}/splits": "has no split 'train'; name one of its directories: test",
        "openai/gsm8k": "openai/gsm8k; a dataset of the Hugging Face hub is fetched with",
    }.items():
        message = refused(source)
        assert message.startswith("data.source: ")
        assert source in message
        assert said in message


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"eval_size": 10}, "data.eval_size = 10 leaves nothing to train on"),
        ({"size": 8, "eval_size": 3}, "data.size = 8, but a.jsonl has 10 rows less 3 held out"),
        ({"eval_source": "b.jsonl", "eval_size": 3}, "data.eval_size = 3, but b.jsonl has 2 rows"),
        ({"eval_source": "a.jsonl", "eval_size": 3}, "data.eval_source: a.jsonl is trained on"),
        ({"eval_source": "no.jsonl", "eval_size": 3}, "data.eval_source: there is no file"),
        ({"options": {"min_terms": 2}}, "data.options: min_terms given"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(fields, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jsonl(Path("b.jsonl"), ROWS[:2])
    assert refused(jsonl(Path("a.jsonl"), ROWS), **fields).startswith(said)


def test_how_many_are_held_out_if_nobody_says(tmp_path):
    def sizes(count: int, **fields: Any) -> tuple[int, ...]:
        source = jsonl(tmp_path / "a.jsonl", [{"prompt": str(n)} for n in range(count)])
        return tuple(map(len, load(source, eval_size=None, **fields)))

    assert [sizes(count) for count in (2, 95, 5000)] == [(1, 1), (85, 10), (4936, 64)]
    assert sizes(30, size=10) == (10, 3)
    assert sizes(30, eval_source=jsonl(tmp_path / "few.jsonl", ROWS[:4])) == (30, 4)
    assert "has 1 row; 0 holds out none" in refusal(sizes, 1)


def test_an_absent_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    message = refused("reasoning_gym:chain_sum", size=1)
    assert "needs the package reasoning_gym: pip install -e '" in message
    assert "[reasoning]' && pip install --no-deps reasoning-gym" in message


TEXTS = [
    {"prompt": f"{n} + 1 =\nor, as words,\t'one more'?", "answer": f'"{n + 1}"'} for n in range(5)
]


def as_table(delimiter: str) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ["prompt", "answer"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(TEXTS)
    return text.getvalue()


KINDS: dict[str, Callable[[], str]] = {
    ".csv": lambda: as_table(","),
    ".tsv": lambda: as_table("\t"),
    ".json": lambda: json.dumps(TEXTS, indent=1),
    "-data.json": lambda: json.dumps({"version": 1, "data": TEXTS}),
    "-other.json": lambda: json.dumps({"version": [1], "train": TEXTS}),
    "-lines.json": lambda: "\n".join(map(json.dumps, TEXTS)),
    ".jsonl": lambda: "\n".join(map(json.dumps, TEXTS)) + "\n\n",
    ".NDJSON": lambda: "\r\n".join(map(json.dumps, TEXTS)),
}


def test_parquet_and_saved_datasets_give_the_same_rows(tmp_path):
    dataset = Dataset.from_list(TEXTS)
    parquet(tmp_path / "a.parquet", TEXTS)
    dataset.save_to_disk(tmp_path / "a")
    DatasetDict(train=dataset, test=dataset.select([0])).save_to_disk(tmp_path / "splits")
    for name, count in (("a.parquet", 5), ("a", 5), ("splits", 5), ("splits/test", 1)):
        rows = read_rows(tmp_path / name, "data.source")
        assert [row.values for row in rows] == TEXTS[:count]
        assert rows[-1].where == f"{tmp_path / name} row {count - 1}" or name == "splits"


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
def test_every_text_format_gives_the_same_rows(kind, packing, mark, tmp_path):
    path = tmp_path / f"rows{kind}{packing}"
    path.write_bytes(PACKERS[packing]((mark + KINDS[kind]()).encode()))
    rows = read_rows(path, "data.source")
    assert [row.values for row in rows] == TEXTS


CELL = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0["), max_size=9)


@given(st.lists(st.tuples(CELL, CELL), min_size=1, max_size=6), st.sampled_from(",\t"))
def test_a_table_reads_back_and_knows_its_lines(cells, delimiter):
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
    "semicolons": ("a.csv", b"p;a\n1;2\n", "one column called 'p;a'; columns are split by commas"),
    "same name": ("a.csv", b"p,p\n1,2\n", "a.csv:1: two columns are called 'p'"),
    "no name": ("a.csv", b"p,\n1,2\n", "a.csv:1: column 2 has no name"),
    "messages": ("a.csv", b"p\n\"[{'role': 'user'}]\"\n", "a.csv:2: column 'p' holds a list of"),
    "latin": ("a.csv", b"p\n1\ncaf\xe9\n", "a.csv:3: no UTF-8 text (byte 3 of the line)"),
    "columns": ("a.json", b'{"p": {"0": 1}}', "should be a list of objects, one a row"),
    "two lists": ("a.json", b'{"x": [{}], "y": [{}]}', "holds several (x, y)"),
    "no object": ("a.json", b'[{"p": 1}, 2]', "a.json row 1: should be a JSON object, is int"),
    "broken": ("a.json", b'[{"p": 1},\n {"p"]', "a.json:2: no JSON: Expecting ':' delimiter"),
    "bad line": ("a.jsonl", b'{"p": 1}\n\n{"p"\n', "a.jsonl:3: no JSON"),
    "twice": ("a.json", b'{"x": [{"p": 1}], "x": [{"p": 2}]}', "a.json: 'x' stands twice"),
    "no gzip": ("a.csv.gz", b"p\n1\n", "a.csv.gz cannot be read: Not a gzipped file"),
    "half gzip": ("a.csv.gz", gzip.compress(b"p\n1\n" * 99)[:-9], "a.csv.gz cannot be read"),
    "no xz": ("a.csv.xz", b"p\n1\n", "a.csv.xz cannot be read"),
    "no zstandard": ("a.csv.zst", b"p\n1\n", "a.csv.zst cannot be read"),
    "Parquet": ("b.parquet", b"no parquet", "no readable Parquet file"),
    "kind": ("a.txt", b"p\n1\n", "is of an unknown kind: known are .jsonl, .ndjson, .json, .csv"),
    "packed Parquet": ("a.parquet.gz", b"", "is of an unknown kind"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "contents", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_bad_file_is_one_line(name, contents, said, tmp_path):
    (tmp_path / name).write_bytes(contents)
    message = refusal(read_rows, tmp_path / name, "data.source")
    assert said in message
    assert str(tmp_path / name) in message


def test_a_long_cell_is_read():
    (row,) = table(b"prompt\n" + b"x" * 200_000, Path("a.csv"), ",")
    assert len(row.values["prompt"]) == 200_000
