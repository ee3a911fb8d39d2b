"""Prompts from files: what is read, what is held out, and what is said of bad files."""

from __future__ import annotations

import json
import math
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from rhymeflow.config import DataConfig
from rhymeflow.data import load_prompts
from rhymeflow.data.prompts import PromptSource
from rhymeflow.errors import UserError
from rhymeflow.trainer.inputs import lines_of

ROWS = [{"prompt": f"{n} + 1 =", "answer": str(n + 1), "level": n % 3} for n in range(10)]


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def load(source: str, **fields: Any) -> tuple[PromptSource, PromptSource]:
    return load_prompts(DataConfig(source=source, **({"eval_size": 0} | fields)), seed=0)


def refused(source: str, **fields: Any) -> str:
    with pytest.raises(UserError) as error:
        load(source, **fields)
    assert "\n" not in str(error.value)
    return str(error.value)


def saved(rows: list[dict[str, Any]], path: Path) -> str:
    Dataset.from_list(rows).save_to_disk(path)
    return str(path)


def saved_splits(rows: list[dict[str, Any]], path: Path) -> str:
    dataset = Dataset.from_list(rows)
    DatasetDict(train=dataset, test=dataset.select([0])).save_to_disk(path)
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "dataset", "splits"])
def test_every_format_gives_the_same_prompts(kind: str, tmp_path: Path) -> None:
    source = {
        "jsonl": lambda: jsonl(tmp_path / "a.jsonl", ROWS),
        "parquet": lambda: parquet(tmp_path / "a.parquet", ROWS),
        "dataset": lambda: saved(ROWS, tmp_path / "a"),
        "splits": lambda: saved_splits(ROWS, tmp_path / "a"),
    }[kind]()
    train, held_out = load(source, eval_size=3)
    assert [train[n].prompt for n in range(len(train))] == [row["prompt"] for row in ROWS[:7]]
    assert [held_out[n].prompt for n in range(3)] == [row["prompt"] for row in ROWS[7:]]
    assert train[4].row == 4
    assert train[4].columns == {"answer": "5", "level": 1}
    assert held_out[2].row == 2
    assert held_out[2].columns["answer"] == "10"


def test_a_split_of_a_saved_dataset_can_be_held_out(tmp_path: Path) -> None:
    source = saved_splits(ROWS, tmp_path / "a")
    train, held_out = load(source, eval_source=f"{source}/test", eval_size=1)
    assert (len(train), len(held_out)) == (10, 1)


def test_size_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n{"prompt": "c"}')
    train, held_out = load(str(path), size=1, eval_size=1)
    assert [prompt.prompt for prompt in (train[0], held_out[0])] == ["a", "c"]
    assert held_out[0].where == f"{path}:4"


def test_another_prompt_column(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"question": "1+1", "prompt": "kept", "answer": "2"}])
    train, _ = load(source, prompt_column="question")
    assert train[0].prompt == "1+1"
    assert train[0].columns == {"prompt": "kept", "answer": "2"}


def test_verl_rows_give_ground_truth_as_a_column(tmp_path: Path) -> None:
    row = {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": "1+1", "name": None}],
        "ability": "math",
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "extra_info": {"index": 0, "split": "train"},
    }
    train, _ = load(parquet(tmp_path / "a.parquet", [row]))
    assert train[0].prompt == [{"role": "user", "content": "1+1"}]
    assert train[0].columns == {
        "data_source": "gsm8k",
        "ability": "math",
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "extra_info": {"index": 0, "split": "train"},
        "ground_truth": "2",
    }
    contradiction = jsonl(tmp_path / "b.jsonl", [row | {"ground_truth": "3"}])
    assert "'ground_truth' and 'reward_model.ground_truth' differ" in refused(contradiction)


GOOD = '{"prompt": "a"}\n'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "a"', "no JSON: Expecting ',' delimiter at column 15"),
        ('["prompt"]', "should be a JSON object, is list"),
        (
            '{"promt": "a"}',
            "no column 'prompt'; data.prompt_column names the one that",
        ),
        ('{"prompt": 3}', "should be a string or a list of messages, is int 3"),
        ('{"prompt": ""}', "the prompt is empty"),
        ('{"prompt": []}', "the list of messages is empty"),
        ('{"prompt": ["hello"]}', "message 0: should be {"),
        ('{"prompt": [{"role": "user"}]}', "message 0: has no 'content'"),
        ('{"prompt": [{"role": "user", "content": [1]}]}', "'content' should be text"),
        ('{"prompt": "a", "completions": 1}', "column 'completions' has the name of an argument"),
        ('{"prompt": "a", "n": 99999999999999999999}', "has more than 64 bits"),
        ('{"prompt": "a", "n": ' + "9" * 6000 + "}", "a number has too many digits"),
        ('{"prompt": "a", "n": NaN}', "column 'n': holds nan, which is no number"),
        ('{"prompt": "a", "n": {"m": [1e999]}}', "column 'n': holds inf, which is no number"),
        ('{"prompt": "a", "n": 1, "n": 2}', "'n' stands twice"),
        ('{"prompt": "a", "n": [{"m": 1, "m": 1}]}', "'m' stands twice"),
        ('{"prompt": "\\ud800"}', "half of a surrogate pair"),
        (
            '{"prompt": "a", "\\ud800": 1}',
            r"the name '\ud800' of a column: holds half of a surrogate",
        ),
        (
            '{"prompt": "a", "b": [{"\\ud800": 1}]}',
            r"column 'b': the key '\ud800' of a mapping: holds",
        ),
        ('{"prompt": [{"role": "user", "content": "a", "\\ud800": 1}]}', "message 0: the key"),
        ('{"prompt": "a", "b": {"c": "\\ud800"}}', "column 'b': holds half of a surrogate pair"),
        ("[" * 100_000, "JSON"),
    ],
)
def test_a_bad_line_is_named(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(GOOD + "\n" + line + "\n" + GOOD)
    message = refused(str(path))
    assert message.startswith(f"{path}:3: ")
    assert said in message


def test_a_number_that_is_none_is_named_in_parquet(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "n": 1.0}, {"prompt": "b", "n": None}, {"prompt": "c", "n": math.nan}]
    path = parquet(tmp_path / "a.parquet", rows)
    assert refused(path).startswith(f"{path} row 2: column 'n': holds nan")


def test_text_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD.encode() + b'{"prompt": "\xff"}\n')
    assert refused(str(path)) == f"{path}:2: no UTF-8 text (byte 12 of the line)"


def test_a_column_that_rewards_cannot_be_given_is_named(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "made": {"of": None}}, {"prompt": "b", "made": {"of": b"x"}}]
    source = parquet(tmp_path / "a.parquet", rows)
    message = refused(source)
    assert message.startswith(f"{source} row 1: column 'made': holds bytes")


def test_times_and_decimals_are_as_trainer_takes_them(tmp_path: Path) -> None:
    at = datetime(2026, 1, 2, 3, 4, 5)
    row = {
        "prompt": "a",
        "made": [{"at": at, "day": at.date(), "hour": at.time()}],
        "lasts": timedelta(seconds=90),
        "price": Decimal("1.50"),
    }
    train, _ = load(parquet(tmp_path / "a.parquet", [row]))
    assert train[0].columns == {
        "made": [{"at": "2026-01-02T03:04:05", "day": "2026-01-02", "hour": "03:04:05"}],
        "lasts": 90.0,
        "price": "1.50",
    }
    (tmp_path / "b.jsonl").write_text("\n".join(lines_of([row], "rows")))
    assert load(str(tmp_path / "b.jsonl"))[0][0].columns == train[0].columns


def test_bad_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("prompt\n")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "b.parquet").write_text("no parquet")
    (tmp_path / "folder").mkdir()
    DatasetDict(test=Dataset.from_list(ROWS)).save_to_disk(tmp_path / "splits")
    for name, said in {
        "missing.jsonl": "there is no file or directory",
        "a.txt": "is of an unknown kind: known are .jsonl, ",
        "empty.jsonl": "holds no rows",
        "b.parquet": "no readable Parquet file",
        "folder": "none that `datasets` saved",
        "splits": "has no split 'train'; name one of its directories: test",
    }.items():
        message = refused(str(tmp_path / name))
        assert message.startswith("data.source: ")
        assert str(tmp_path / name) in message
        assert said in message


def test_numbers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", ROWS)
    assert "eval_size = 10 leaves nothing to train on" in refused(source, eval_size=10)
    assert "data.size = 8, but" in refused(source, size=8, eval_size=3)
    assert "10 rows less 3 held out" in refused(source, size=8, eval_size=3)
    other = jsonl(tmp_path / "b.jsonl", ROWS[:2])
    assert "data.eval_size = 3, but" in refused(source, eval_source=other, eval_size=3)
    assert "is trained on" in refused(source, eval_source=source, eval_size=3)
    assert "data.options: min_terms given" in refused(source, options={"min_terms": 2})
    missing = refused(source, eval_source=str(tmp_path / "no.jsonl"), eval_size=3)
    assert missing.startswith("data.eval_source: ")


def test_how_many_are_held_out_if_nobody_says(tmp_path: Path) -> None:
    def sizes(count: int, **fields: Any) -> tuple[int, int]:
        rows = [{"prompt": str(n)} for n in range(count)]
        source = jsonl(tmp_path / f"{count}.jsonl", rows)
        train, held_out = load(source, eval_size=None, **fields)
        return len(train), len(held_out)

    assert sizes(2) == (1, 1)
    assert sizes(95) == (85, 10)
    assert sizes(5000) == (4936, 64)
    assert sizes(30, size=10) == (10, 3)
    few = jsonl(tmp_path / "few.jsonl", ROWS[:4])
    assert sizes(30, eval_source=few) == (30, 4)
    with pytest.raises(UserError, match=r"has 1 row; 0 holds out none"):
        sizes(1)


def test_an_absent_package_is_named_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = parquet(tmp_path / "a.parquet", ROWS)
    folder = saved(ROWS, tmp_path / "a")
    (tmp_path / "a.jsonl.zst").touch()
    for module in ("pyarrow", "datasets", "reasoning_gym"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    assert "needs the package pyarrow: pip install 'rhymeflow[data]'" in refused(file)
    assert "reading .zst needs the package pyarrow" in refused(str(tmp_path / "a.jsonl.zst"))
    assert "needs the package datasets: pip install 'rhymeflow[data]'" in refused(folder)
    message = refused("reasoning_gym:chain_sum", size=1)
    assert "needs the package reasoning_gym: pip install 'rhymeflow[reasoning]' && " in message
