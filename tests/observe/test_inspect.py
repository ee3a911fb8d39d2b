"""`rhymeflow inspect`: tables of a run, one trajectory, and what is not a run."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rhymeflow.core.types import TrajectoryId
from rhymeflow.errors import UserError
from rhymeflow.observe.inspect import inspect
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.observe.runs import make_run


def shown(run_dir, trajectory=None, width=100) -> str:
    console = Console(file=io.StringIO(), width=width)
    inspect(run_dir, trajectory, console)
    return console.file.getvalue()


def cells(text: str) -> list[list[str]]:
    return [row.split() for row in text.splitlines()]


def test_tables_of_a_run(tmp_path):
    make_run(tmp_path)
    text = shown(tmp_path)
    rows = cells(text)
    assert ["0", "0", "-", "0.250", *["-"] * 8] in rows
    assert [
        "4",
        "41",
        "0.400",
        "0.750",
        "55.0",
        "0.50",
        "1",
        "0.0125",
        "1.234",
        "10.50",
        "10%",
        "30%",
    ] in rows
    assert ["0", "10", "62.5%", "█" * 30] in rows
    assert ["1", "6", "37.5%", "█" * 18] in rows
    assert "Groups left out (reward failed: boom): 1" in text


def test_drafts_by_epoch_and_by_version(tmp_path):
    make_run(tmp_path)
    text = shown(tmp_path)
    rows = cells(text)
    # Version 0 drafted nothing. Version 4 made group 9: 19 and 109 tokens in segments of 5 and the
    # rest, each in half as many iterations.
    assert ["0", "8", "358", "1.00", "0", "-"] in rows
    assert ["4", "2", "128", "1.97", "128", "49.2%"] in rows
    ((tokens, per_step),) = [row[2:4] for row in rows if row[:2] == ["0", "20"]]
    assert (tokens, per_step) == ("1,190", "1.52"), "all in one epoch"
    assert "estimate it: 6.0 s" in text


def test_a_run_that_drafted_nothing_shows_no_drafts(tmp_path):
    make_run(tmp_path, num_steps=0)
    assert "Drafts by" not in shown(tmp_path)


def test_how_well_lengths_were_predicted(tmp_path):
    for name, steps in (("short", 1), ("long", 9)):
        (tmp_path / name).mkdir()
        make_run(tmp_path / name, num_steps=steps)
    assert (
        "Length prediction: seen prompts 75%, rank correlation -, coverage 80%, "
        "explained variance 0.62"
    ) in shown(tmp_path / "short")
    said = "rank correlation 0.88, coverage 81%"
    assert said in shown(tmp_path / "long"), "of the last step"


def test_a_run_that_predicted_nothing_does_not_speak_of_it(tmp_path):
    make_run(tmp_path, num_steps=0)
    assert "Length prediction" not in shown(tmp_path)


def test_many_versions_are_put_together(tmp_path):
    make_run(tmp_path, num_steps=200)
    text = shown(tmp_path)
    by_version = text[text.index("Drafts by version") : text.index("Time that drafts")]
    spans = [row[0] for row in cells(by_version) if len(row) == 6 and row[1].isdigit()]
    assert spans[:2] == ["0-16", "17-33"]
    assert len(spans) == 12


def test_lengths_and_endings_by_quantile(tmp_path):
    make_run(tmp_path)
    rows = cells(shown(tmp_path))
    # 20 responses: 10..19 tokens (stopped, reward 1), 100..109 (cut, reward 0). Groups 8 and 9 of
    # each kind are the longest: aborted and open.
    assert ["10-13", "4", "1.000", "0.0%", "100.0%", "0.0%", "0.0%", "0.0%"] in rows
    assert ["18-101", "4", "0.500", "50.0%", "50.0%", "0.0%", "25.0%", "25.0%"] in rows
    assert ["106-109", "4", "0.000", "100.0%", "50.0%", "0.0%", "25.0%", "25.0%"] in rows


def test_members_that_were_not_needed_count_with_the_length_they_came_to(tmp_path):
    """Leaving out what was stopped would hide that it is the long ones that are."""
    store = SqliteTrajectoryStore(tmp_path / "events.db")
    store.put_group(0, row=0, epoch=0, prompt="p", prompt_tokens=[1], columns={})
    for member, length in enumerate((3, 4, 5, 6, 60)):
        where = TrajectoryId(0, member)
        tokens = range(length)
        store.put_segment(
            where,
            start=0,
            version=0,
            instance="r",
            steps=1,
            drafted=0,
            tokens=tokens,
            logprobs=[-1.0] * length,
        )
        if member < 4:
            store.put_finished(where, length=length, reason="finished_early" if member else "stop")
            store.put_reward(where, reward=1.0, components={})
    store.put_consumed(0, version=0, members=(0, 1, 2))
    store.commit()
    store.close()
    rows = cells(shown(tmp_path))
    assert ["3-3", "1", "1.000", "0.0%", "100.0%", "0.0%", "0.0%", "0.0%"] in rows
    assert ["6-6", "1", "1.000", "100.0%", "0.0%", "0.0%", "100.0%", "0.0%"] in rows
    assert ["60-60", "1", "-", "0.0%", "0.0%", "0.0%", "100.0%", "0.0%"] in rows
    assert "aborted: its group did not need it" in shown(tmp_path, "0.4")
    assert "aborted: its group did not need it" in shown(tmp_path, "0.3")
    assert "trained on in batch 0, 0 versions old" in shown(tmp_path, "0.2")


@pytest.mark.parametrize("width", [80, 100])
def test_nothing_wraps(tmp_path, width):
    make_run(tmp_path)
    assert all(len(text) <= width for text in shown(tmp_path, width=width).splitlines())
    assert "…" not in shown(tmp_path, width=width)


def test_a_long_run_shows_some_steps_and_says_so(tmp_path):
    make_run(tmp_path, num_steps=200)
    text = shown(tmp_path)
    steps = [int(row[0]) for row in cells(text) if len(row) == 12 and row[0].isdigit()]
    assert len(steps) < 50
    assert (steps[0], steps[-1]) == (0, 200)
    assert f"{201 - len(steps)} more in metrics.jsonl" in text


def test_one_trajectory_in_full(tmp_path):
    make_run(tmp_path)
    text = shown(tmp_path, "4.0")
    for part in (
        "row 4, epoch 0",
        "answer = 4",
        "14 tokens, ended by stop",
        "1 (exact 1)",
        "trained on in batch 2, 1 version old",
        "[b]what is 4?",
        "[/red] it is 4",
    ):
        assert part in text
    assert ["0", "4", "1", "rollout-0", "-0.500", "1.67", "5", "40.0%"] in cells(text)
    assert ["5", "13", "2", "rollout-0", "-0.500", "1.80", "9", "44.4%"] in cells(text)
    assert "aborted: reward failed: boom" in shown(tmp_path, "8.1")
    assert "open" in shown(tmp_path, "9.0")


@pytest.mark.parametrize(
    ("trajectory", "message"),
    [("12", "is not GROUP.MEMBER"), ("1.x", "is not GROUP.MEMBER"), ("77.0", "has no trajectory")],
)
def test_no_such_trajectory(tmp_path, trajectory, message):
    make_run(tmp_path)
    with pytest.raises(UserError, match=message):
        shown(tmp_path, trajectory)


def test_a_run_before_its_first_step(tmp_path):
    make_run(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    assert "No step has been completed." in shown(tmp_path)


def test_what_is_no_run_directory(tmp_path):
    with pytest.raises(UserError, match="is not a run directory"):
        shown(tmp_path)
    with pytest.raises(UserError, match="no such directory"):
        shown(tmp_path / "nowhere")
    (tmp_path / "events.db").write_text("something else entirely" * 100)
    with pytest.raises(UserError, match="cannot be opened as an event store"):
        shown(tmp_path)
