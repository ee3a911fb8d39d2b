"""`rhymeflow inspect`: tables of a run, one trajectory, and what is not a run."""

from __future__ import annotations

import io
import json
import sqlite3

import pytest
from rich.cells import cell_len
from rich.console import Console

from rhymeflow.core.commands import Finish
from rhymeflow.core.events import Tick
from rhymeflow.core.types import TrajectoryId
from rhymeflow.errors import UserError
from rhymeflow.observe.inspect import inspect
from rhymeflow.store.base import ENVIRONMENT
from rhymeflow.store.damage import open_undamaged
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.observe.runs import make_run


def shown(run_dir, trajectory=None, width=100, **options) -> str:
    console = Console(file=io.StringIO(), width=width)
    inspect(run_dir, console, trajectory=trajectory, **options)
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
        "40",
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
    throughput = "Throughput: 0.4 trained responses/s, 22 of their tokens/s"
    assert throughput in text, "of 55 sampled tokens each, what environments answered left out"
    assert "mismatch" in text, "with the sampler, which is no KL to a reference"
    assert "kl" not in text.split()


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
    assert "trained on in step 1, 0 versions old" in shown(tmp_path, "0.2")


WIDE = "\x1b[31m\u3053\u3093\u306b\u3061\u306f \U0001f600 e\u0301\n" * 40


@pytest.mark.parametrize("width", [80, 100, 200])
@pytest.mark.parametrize("words", [None, WIDE], ids=["plain", "wide"])
def test_no_line_is_wider_than_the_console(tmp_path, width, words):
    make_run(tmp_path, num_steps=200, words=words)
    for options in ({}, {"trajectory": "4.0"}, {"worst": 3, "best": 2}):
        text = shown(tmp_path, width=width, **options)
        assert max(map(cell_len, text.splitlines())) <= width, options
        assert "…" not in text, "cut by the console"
        assert "\x1b" not in text, "a response acts on the terminal"


def test_columns_of_large_numbers_are_left_out_before_any_is_cut(tmp_path):
    make_run(tmp_path)
    row = {"step": 12345, "time": 1e6, "eval/reward": -1e5, "reward": 1e5, "entropy": 1e4}
    row |= {"completions/mean_length": 1e5, "grad_norm": 1e7, "off_policy/mismatch_kl": 1e4}
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    text = shown(tmp_path, width=80)
    assert " 100000.000 " in text
    assert " -100000.000 " in text
    assert "idle l" not in text
    assert "…" not in text
    assert max(map(cell_len, text.splitlines())) <= 80


def test_it_opens_with_what_was_learned(tmp_path):
    make_run(tmp_path, num_steps=9)
    text = shown(tmp_path, width=80)
    rows = cells(text)
    assert ["held-out", "reward", "0.250", "0.750", "0.750", "at", "9", "▁█"] in rows
    assert ["training", "reward", "0.100", "0.900", "0.900", "at", "9", "▁▂▃▄▅▅▆▇█"] in rows
    assert ["exact", "0.100", "0.900", "0.900", "at", "9", "▁▂▃▄▅▅▆▇█"] in rows
    assert ["short", "0.500", "0.500", "0.500", "at", "1", "▁▁▁▁▁▁▁▁▁"] in rows
    places = [
        text.index(words)
        for words in ("held-out", "Best responses of step 9", "Worst responses", "Staleness")
    ]
    assert places == sorted(places)
    best, worst = text[places[1] : places[2]], text[places[2] : places[3]]
    assert "17.0  reward 1.000, 27 tokens, step 9" in best
    assert "16.0  reward 1.000" in best
    assert "17.1  reward 0.000, 117 tokens, cut at the limit, step 9" in worst
    assert "response [/red] it is 17" in worst
    assert "prompt   [b]what is 17?" in worst
    assert "columns  answer = 17" in worst
    assert "rewards  exact 0, short 0.5" in worst


def ids(text: str) -> list[str]:
    return [row[0] for row in cells(text) if len(row) > 1 and row[1] == "reward"]


def test_the_worst_and_the_best_can_be_listed(tmp_path):
    make_run(tmp_path)
    # Groups 0 to 7 are trained on, 8 was left out, 9 is open: the newest group comes first.
    assert ids(shown(tmp_path, worst=3)) == ["9.1", "8.1", "7.1"]
    assert ids(shown(tmp_path, best=12)) == [*(f"{g}.0" for g in range(9, -1, -1)), "9.1", "8.1"]
    assert ids(shown(tmp_path, worst=9, step=3)) == ["5.1", "4.1", "5.0", "4.0"]
    assert "8.1  reward 0.000, 108 tokens, cut at the limit, aborted" in shown(tmp_path, worst=3)
    assert "Staleness" not in shown(tmp_path, worst=3)
    assert "No response of step 77 has a reward." in shown(tmp_path, worst=1, step=77)


def test_options_that_make_no_sense(tmp_path):
    make_run(tmp_path)
    with pytest.raises(UserError, match="--worst 0: should be 1 or more"):
        shown(tmp_path, worst=0)
    with pytest.raises(UserError, match="--best -1: should be 1 or more"):
        shown(tmp_path, best=-1)


def test_it_says_what_limits_the_run(tmp_path):
    make_run(tmp_path)
    assert "Pace:" not in shown(tmp_path), "no attempt says at which bound it ran"
    store = SqliteTrajectoryStore(tmp_path / "events.db")
    store.begin_attempt('{"schedule": {"name": "synchronous"}}', now=0.0, started="2026")
    store.commit()
    store.close()
    assert ("Pace: limited by rollout: learner idle 30%, instances 10% (last 3 steps)") in shown(
        tmp_path
    )
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().replace('"idle/rollout":0.1', '"idle/rollout":0.3'))
    assert "Pace: limited by the staleness bound: instances idle 30%" in shown(tmp_path)


def test_a_run_that_has_just_begun_and_one_that_rewarded_something(tmp_path):
    store = SqliteTrajectoryStore(tmp_path / "events.db")
    store.commit()
    assert "step 0" in shown(tmp_path)
    assert "So far: 0 prompts, 0 finished responses, 0 rewarded" in shown(tmp_path)
    store.put_group(0, row=0, epoch=0, prompt="p", prompt_tokens=[1], columns={})
    for member, reward in enumerate((0.5, 0.25, None)):
        where = TrajectoryId(0, member)
        store.put_finished(where, length=1 + member, reason="stop")
        store.put_text(where, "" if member else "said")
        if reward is not None:
            store.put_reward(where, reward=reward, components={"f": reward})
    store.commit()  # and the run goes on
    text = shown(tmp_path)
    assert "So far: 1 prompts, 3 finished responses, 2 rewarded, mean reward 0.375" in text
    assert ids(text) == ["0.0", "0.1"], "the best, the worst"
    assert "Best responses so far" in text
    assert "0.0  reward 0.500, 1 token, waits\n" in text
    assert "response (empty)" in text
    store.close()


def test_responses_are_of_the_last_step_that_is_complete(tmp_path):
    make_run(tmp_path, num_steps=4)
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "metrics.jsonl").write_text("".join(f"{row}\n" for row in rows[:4]))
    text = shown(tmp_path)
    assert "step 3 after" in text
    assert "Best responses of step 3" in text


def test_the_headline_says_how_far_the_run_is(tmp_path):
    make_run(tmp_path)
    assert "step 4 after 0:41; it was killed" in shown(tmp_path)
    (tmp_path / "config.yaml").write_text(
        "name: sums\nlearner: {max_steps: 9}\nschedule: {name: staleflow}\n"
    )
    assert "sums, staleflow: step 4 of 9 after 0:41; it was killed" in shown(tmp_path)
    (tmp_path / "summary.json").write_text('{"seconds": 41}')
    assert "step 4 of 9 after 0:41; it was stopped" in shown(tmp_path)
    store = SqliteTrajectoryStore(tmp_path / "events.db")  # resumed: the summary is of before
    assert "step 4 of 9 after 0:41; it is running" in shown(tmp_path)
    store.record_command(store.record(41.0, [Tick()]), Finish())
    store.commit()
    store.close()
    assert "step 4 of 9 after 0:41; it has ended" in shown(tmp_path)


def test_a_long_run_shows_some_steps_and_says_so(tmp_path):
    make_run(tmp_path, num_steps=200)
    text = shown(tmp_path)
    steps = [int(row[0]) for row in cells(text) if len(row) == 12 and row[0].isdigit()]
    assert len(steps) < 20
    assert (steps[0], steps[-1]) == (0, 200)
    assert f"{201 - len(steps)} more in metrics.jsonl" in text


def test_one_trajectory_in_full(tmp_path):
    make_run(tmp_path)
    text = shown(tmp_path, "4.0")
    for part in (
        "row 4, epoch 0",
        "answer = 4",
        "14 tokens, ended by stop",
        "1 (exact 1, short 0.5)",
        "trained on in step 3, 1 version old",
        "[b]what is 4?",
        "[/red] it is 4",
    ):
        assert part in text
    assert ["0", "4", "1", "rollout-0", "-0.500", "1.67", "5", "40.0%"] in cells(text)
    assert ["5", "13", "2", "rollout-0", "-0.500", "1.80", "9", "44.4%"] in cells(text)
    assert "aborted: reward failed: boom" in shown(tmp_path, "8.1")
    assert "open" in shown(tmp_path, "9.0")


def test_a_response_in_which_an_environment_answered(tmp_path):
    store = SqliteTrajectoryStore(tmp_path / "events.db")
    store.begin_attempt("{}", now=0.0, started="2026-01-01T00:00:00+00:00")
    store.put_group(0, row=0, epoch=0, prompt="p", prompt_tokens=[1], columns={})
    one = TrajectoryId(0, 0)
    for start, length, steps in ((0, 6, 4), (9, 2, 2)):
        store.put_segment(
            one, start=start, version=0, instance="rollout-0", steps=steps, drafted=steps,
            tokens=[7] * length, logprobs=[-0.5] * length,
        )  # fmt: skip
    store.put_observed(one, start=6, version=0, tokens=[7] * 3)
    store.commit()
    store.close()
    found = cells(shown(tmp_path, "0.0", width=80))
    assert [
        "from",
        "to",
        "version",
        "instance",
        "logprob",
        "length",
        "drafted",
        "accepted",
    ] in found
    assert ["0", "5", "0", "rollout-0", "-0.500", "1.50", "4", "50.0%"] in found
    assert ["6", "8", "0", ENVIRONMENT, "-", "-", "-", "-"] in found


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


def without(damaged: bytes, first: int, last: int) -> bytes:
    """The file with its pages from `first` up to `last` overwritten."""
    size = int.from_bytes(damaged[16:18])
    return damaged[: first * size] + b"\xa5" * (last - first) * size + damaged[last * size :]


@pytest.mark.parametrize(
    "options", [{}, {"worst": 3}, {"trajectory": "1.0"}, {"step": 1}, {"group": 1}]
)
def test_a_damaged_store_is_one_line(tmp_path, options):
    path = make_run(tmp_path, num_steps=8) / "events.db"
    contents = path.read_bytes()
    path.write_bytes(without(contents, 3, len(contents) // int.from_bytes(contents[16:18])))
    with pytest.raises(UserError) as error:
        shown(tmp_path, **options)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_each_damaged_page_is_told_and_a_defect_is_none(tmp_path):
    path = make_run(tmp_path, num_steps=8) / "events.db"
    contents = path.read_bytes()
    told = 0
    for page in range(1, len(contents) // int.from_bytes(contents[16:18])):
        path.write_bytes(without(contents, page, page + 1))
        try:
            shown(tmp_path)
        except UserError as error:
            told += "damaged" in str(error)
    assert told > 5
    path.write_bytes(contents)
    with pytest.raises(sqlite3.OperationalError), open_undamaged(path) as reader:
        reader.query("SELECT nothing FROM nowhere")
