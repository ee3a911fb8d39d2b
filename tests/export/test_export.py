"""`rhymeflow export`: what rows hold, which responses are in them, and what is said of the rest."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from rhymeflow import cli
from rhymeflow.config.load import build_config
from rhymeflow.environments.rendering import ChatRenderer, TextRenderer
from rhymeflow.errors import UserError
from rhymeflow.export import export as module
from rhymeflow.export.export import Filters, Rows, export
from rhymeflow.models.tokenizer import load_tokenizer
from rhymeflow.sft.train import load
from rhymeflow.store.reader import TrajectoryReader
from tests.export.made import TEMPLATE, MadeRun, model
from tests.refused import refusal

TOOL = "rhymeflow.recipes.tools:Calculator"


@pytest.fixture
def run(tmp_path):
    """Group 0: a best, a worst and one that was not needed; 1: equal rewards; 2: aborted; 3: in
    flight."""
    made = MadeRun(tmp_path / "run", model(tmp_path / "model"), **{"data.chat_template": False})
    made.group(0)
    made.response(0, 0, "a<eos>", 0.25)
    made.response(0, 1, "b<eos>", 1.0)
    made.response(0, 2, "ccc", 0.0, reason="length")
    made.store.put_consumed(0, version=1, members=(0, 1))
    made.group(1, row=0)
    made.response(1, 0, "d<eos>", 1.0, version=2)
    made.response(1, 1, "e<eos>", 1.0, version=2)
    made.store.put_consumed(1, version=2, members=(0, 1))
    made.group(2)
    made.response(2, 0, "f<eos>", None)
    made.store.put_ending(2, "aborted", version=2, reason="reward failed: boom")
    made.group(3)
    made.response(3, 0, "gg", None, reason=None, version=2)
    made.store.commit()
    yield made
    made.store.close()


def rows_of(run_dir: Path, what: str = "trajectories", **options: Any) -> list[dict[str, Any]]:
    output = run_dir.parent / "out.jsonl"
    export(run_dir, output, what=what, force=True, **options)
    return [json.loads(line) for line in output.read_text().splitlines()]


# -- trajectories ---------------------------------------------------------------------------------


def test_a_trajectory_is_a_row_with_all_that_is_stored(run):
    rows = rows_of(run.run_dir, with_tokens=True)
    assert rows[1] == {
        "group": 0, "member": 1, "row": 0, "epoch": 0, "prompt": "q?", "response": "b",
        "columns": {"answer": "c", "level": 2}, "reward": 1.0, "components": {"right": 1.0},
        "ending": "consumed", "ending_reason": None, "reason": "stop", "length": 2, "step": 2,
        "first_version": 0, "last_version": 0, "staleness": 1, "prompt_tokens": [1, 2, 3],
        "tokens": run.ids("b<eos>"), "logprobs": [-0.5, -0.5], "versions": [0, 0],
        "observed": [False, False],
    }  # fmt: skip
    found = [(row["ending"], row["ending_reason"], row["reason"], row["step"]) for row in rows]
    assert found[2:] == [
        ("aborted", None, "length", None),  # its group did not need it
        ("consumed", None, "stop", 3),
        ("consumed", None, "stop", 3),
        ("aborted", "reward failed: boom", "stop", None),
        ("unfinished", None, None, None),
    ]
    assert rows[-1]["response"] is None
    assert rows[-1]["length"] == 2


def test_all_formats_hold_the_same(run):
    import datasets

    wanted = rows_of(run.run_dir, with_tokens=True)
    for name, kind in (("out.parquet", None), ("out", "datasets")):
        output = run.run_dir.parent / name
        done = export(run.run_dir, output, kind=kind, with_tokens=True)
        if kind is None:
            data = datasets.Dataset.from_parquet(str(output), cache_dir=str(output.parent / "c"))
        else:
            data = datasets.load_from_disk(str(output))
        found = [dict(row) for row in data]
        for row in found:
            row["columns"] = json.loads(row["columns"])
            row["components"] = row["components"] and dict(row["components"])
        # Of a structure Arrow holds a null in each field.
        plain = [r | {"components": r["components"] or r0["components"]}
                 for r, r0 in zip(wanted, found, strict=True)]  # fmt: skip
        assert found == plain
        assert done.rows == len(wanted)
    assert {path.name for path in run.run_dir.parent.iterdir()} == {
        "run", "model", "out.jsonl", "out.parquet", "out", "c",
    }  # fmt: skip


def test_no_transaction_stays_open_between_rows(run, monkeypatch):
    whole = rows_of(run.run_dir)
    monkeypatch.setattr(module, "GROUPS_AT_ONCE", 1)
    assert rows_of(run.run_dir) == whole, "parts make no difference"
    reader = TrajectoryReader(run.run_dir / "events.db")
    found = iter(Rows(reader, "trajectories", Filters(), with_tokens=True))
    next(found)
    run.response(1, 2, "x")
    run.store.commit()
    other = sqlite3.connect(run.run_dir / "events.db")
    ((is_busy, *_),) = other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    other.close()
    assert not is_busy
    assert len(list(found)) == 7, "a group that is read later is read as it is then"
    reader.close()


def test_tokens_that_were_deleted_are_null_and_said(run, tmp_path):
    run.store.prune(before=2, history_tokens=0)
    for _ in range(3):
        run.store.commit()
    output = tmp_path / "rows.jsonl"
    done = export(run.run_dir, output, with_tokens=True)
    first = json.loads(output.read_text().splitlines()[0])
    assert (first["tokens"], first["response"], first["length"]) == (None, None, 2)
    assert first["reward"] == 0.25
    assert "3 without tokens (run.keep_tokens)" in done.line()
    assert f"3 {module.NO_TEXT}" in done.line()
    done = export(run.run_dir, output, what="sft", force=True)
    assert done.left_out == {module.NO_TEXT: 3, "not complete": 1}
    assert done.rows == 3


# -- to learn from --------------------------------------------------------------------------------


def test_sft_has_complete_responses_only(run, tmp_path):
    rows = rows_of(run.run_dir, "sft")
    assert rows == [{"prompt": "q?", "completion": each} for each in "abdef"]
    done = export(run.run_dir, tmp_path / "again.jsonl", what="sft")
    assert done.line().endswith("5 rows of 7 responses; left out: 1 cut short, 1 not complete")


def test_a_pair_is_the_best_and_the_worst_of_a_group(run):
    assert rows_of(run.run_dir, "preferences") == [
        {
            "prompt": "q?", "chosen": "b", "rejected": "ccc", "chosen_reward": 1.0,
            "rejected_reward": 0.0, "group": 0, "chosen_member": 1, "rejected_member": 2,
        }
    ]  # fmt: skip
    (pair,) = rows_of(run.run_dir, "preferences", filters=Filters(endings=("consumed",)))
    assert pair["rejected"] == "a"


def test_a_response_that_was_cut_is_never_chosen(tmp_path):
    made = MadeRun(tmp_path / "run", model(tmp_path / "model"), **{"data.chat_template": False})
    made.group(0)
    made.response(0, 0, "aaa", 1.0, reason="length")
    made.response(0, 1, "b<eos>", 0.5)
    with pytest.raises(UserError, match="no row of preferences to write: 2 without a better"):
        rows_of(made.close(), "preferences")
    assert not (tmp_path / "out.jsonl").exists()


def conversation(tmp_path: Path, turns: list[Any], **fields: Any) -> tuple[MadeRun, list[int]]:
    """A run of one response to a chat."""
    directory = model(tmp_path / "model", TEMPLATE)
    made = MadeRun(tmp_path / "run", directory, **{"data.chat_template": True, **fields})
    made.group(0, [{"role": "user", "content": "q?"}])
    tokens = made.response(0, 0, turns)
    made.store.put_consumed(0, version=0, members=(0,))
    made.close()
    return made, tokens


def learnt(made: MadeRun, rows: Path, **data: Any) -> tuple[list[int], list[bool]]:
    """What `rhymeflow sft` learns of the first row: tokens, and which are only read."""
    config = build_config(
        {"model.name": made.config.model.name, "data.source": str(rows), "data.eval_size": 0},
        where="test",
    )
    config = config.changed(data=data)
    sample = load(config, load_tokenizer(config.model))[0][0]
    return sample.completion_ids, sample.observed or [False] * len(sample.completion_ids)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows"])
def test_sft_learns_the_tokens_that_were_sampled(tmp_path, name):
    made = MadeRun(tmp_path / "run", model(tmp_path / "model"), **{"data.chat_template": False})
    made.group(0)
    tokens = made.response(0, 0, "a+b<eos>")
    made.close()
    kind = None if "." in name else "datasets"
    export(made.run_dir, tmp_path / name, what="sft", kind=kind)
    assert learnt(made, tmp_path / name) == (tokens, [False] * 4)


@pytest.mark.parametrize("skips", [True, False])
def test_sft_learns_a_chat_with_the_prompt_that_the_policy_had(tmp_path, skips):
    fields = {"data.system_prompt": "be short", "rollout.skip_special_tokens": skips}
    made, tokens = conversation(tmp_path, ["ok<eos>"], **fields)
    (row,) = rows_of(made.run_dir, "sft")
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert row["completion"] == [{"role": "assistant", "content": "ok"}]
    assert learnt(made, tmp_path / "out.jsonl")[0] == tokens


@pytest.mark.parametrize(
    "answer",
    [
        [{"role": "tool", "content": "42"}],
        [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}],
        [{"role": "user", "content": "go on;"}],
    ],
)
def test_what_an_environment_answered_is_read_and_not_learnt(tmp_path, answer):
    tokenizer = load_tokenizer(build_config(
        {"model.name": str(model(tmp_path / "model", TEMPLATE))}, where="test").model)  # fmt: skip
    turn = list(tokenizer("call<eos>", add_special_tokens=False).input_ids)
    observed = ChatRenderer(tokenizer, reads_users=False).encode(list(answer), turn)
    environment = {"environment.classes": [{"environment": TOOL}]}
    made, tokens = conversation(tmp_path, ["call<eos>", observed, "done<eos>"], **environment)
    (row,) = rows_of(made.run_dir, "sft")
    assert row["completion"] == [
        {"role": "assistant", "content": "call"}, *answer,
        {"role": "assistant", "content": "done"},
    ]  # fmt: skip
    is_observed = [False] * 5 + [True] * len(observed) + [False] * 5
    assert learnt(made, tmp_path / "out.jsonl") == (tokens, is_observed)
    (row,) = rows_of(made.run_dir, with_tokens=True)
    assert row["observed"] == is_observed
    assert [turn["role"] for turn in row["turns"]] == ["assistant", "environment", "assistant"]
    assert row["logprobs"][5] is None
    assert row["logprobs"][0] == -0.5


@pytest.mark.parametrize("answer", ["odd", ";[user]a<eos>b<eos>;[assistant]"])
def test_an_answer_that_no_template_writes_is_left_out_and_counted(tmp_path, answer):
    """The second has the shape of one; but a run never lets an answer end a turn."""
    environment = {"environment.classes": [{"environment": TOOL}]}
    made, _ = conversation(tmp_path, ["call<eos>", answer, "done<eos>"], **environment)
    with pytest.raises(UserError, match="1 whose answers of the environment are no messages"):
        rows_of(made.run_dir, "sft")


def test_answers_to_text_prompts_stand_as_they_are(tmp_path):
    fields = {"data.chat_template": False, "environment.classes": [{"environment": TOOL}]}
    made = MadeRun(tmp_path / "run", model(tmp_path / "model"), **fields)
    made.group(0)
    answer = TextRenderer(made.tokenizer).encode("42;", [])
    tokens = made.response(0, 0, ["call<eos>", answer, "x<eos>"])
    made.close()
    (row,) = rows_of(made.run_dir, "sft")
    assert row["completion"][1] == {"role": "user", "content": "42;"}
    assert learnt(made, tmp_path / "out.jsonl") == (tokens, [False] * 5 + [True] * 3 + [False] * 2)


def test_what_a_response_was_begun_with_is_part_of_the_completion(tmp_path):
    fields = {"data.chat_template": True, "data.assistant_prefix": "so "}
    made = MadeRun(tmp_path / "run", model(tmp_path / "model", TEMPLATE), **fields)
    says = {"role": "user", "content": "q"}, {"role": "assistant", "content": "well "}
    made.group(0, list(says))
    made.response(0, 0, "ok<eos>")
    (row,) = rows_of(made.close(), "sft")
    assert row["prompt"] == [says[0]]
    assert row["completion"] == [{"role": "assistant", "content": "well so ok"}]


# -- which ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        (Filters(min_reward=0.25), [(0, 0), (0, 1), (1, 0), (1, 1)]),
        (Filters(steps=(1, 2)), [(0, 0), (0, 1)]),
        (Filters(steps=(3, 3), min_reward=1.0), [(1, 0), (1, 1)]),
        (Filters(endings=("aborted",)), [(0, 2), (2, 0)]),
        (Filters(endings=("aborted", "unfinished")), [(0, 2), (2, 0), (3, 0)]),
        (Filters(best=1), [(1, 0)]),  # of equals the newer group; groups 0 and 1 are of one row
        (Filters(best=3), [(0, 1), (1, 0), (1, 1)]),
        (Filters(best=1, steps=(2, 2)), [(0, 1)]),
    ],
)
def test_filters(run, filters, found):
    assert [(row["group"], row["member"]) for row in rows_of(run.run_dir, filters=filters)] == found


# -- files and mistakes ---------------------------------------------------------------------------


def test_what_is_there_is_replaced_by_force_only(run, tmp_path):
    output = tmp_path / "rows.jsonl"
    output.write_text("mine")
    assert "is there already; --force" in refusal(export, run.run_dir, output)
    assert output.read_text() == "mine"
    export(run.run_dir, output, force=True)
    assert output.read_text() != "mine"
    with pytest.raises(UserError, match="is a directory, and no datasets"):
        export(run.run_dir, run.run_dir, kind="datasets", force=True)
    log = run.run_dir / "events.db"
    before = log.read_bytes()
    with pytest.raises(UserError, match="is among the run's own files"):
        export(run.run_dir, log, kind="jsonl", force=True)
    assert log.read_bytes() == before
    for _ in range(2):
        export(run.run_dir, tmp_path / "saved", kind="datasets", force=True)


def test_a_row_that_a_table_does_not_hold_leaves_nothing(tmp_path):
    made = MadeRun(tmp_path / "run", model(tmp_path / "model"))
    for group, prompt in enumerate(["q?", [{"role": "user", "content": "q?"}]]):
        made.group(group, prompt)
        made.response(group, 0, "a<eos>")
    made.close()
    for kind in ("parquet", "datasets"):
        with pytest.raises(UserError, match=f"'prompt' is text in some.*--format {kind}"):
            export(made.run_dir, tmp_path / "rows", kind=kind)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "model"}
    assert len(rows_of(made.run_dir)) == 2


def test_the_command_says_what_it_wrote(run, capsys, tmp_path):
    output = str(tmp_path / "r.jsonl")
    options = ["--steps", ":2", "--ending", "consumed", "--min-reward", "1"]
    assert cli.main(["export", str(run.run_dir), "--output", output, *options]) == 0
    said = capsys.readouterr().out
    assert said == f"{output}: 1 rows of 7 responses; left out: 6 not wanted\n"
