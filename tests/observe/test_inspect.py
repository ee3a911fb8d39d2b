"""`rhymeflow inspect`: a run, a step, a group and responses, shown and as JSON."""

import io
import json
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from rhymeflow import cli
from rhymeflow.core.commands import Finish
from rhymeflow.core.events import Tick
from rhymeflow.core.types import TrajectoryId
from rhymeflow.errors import UserError
from rhymeflow.observe.inspect import Question, as_json, inspect
from rhymeflow.store.damage import open_undamaged
from rhymeflow.store.schema import ENVIRONMENT
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.observe.runs import begun, make_run, stored
from tests.store.stores import answered, finished, group, segment

ACTS = "\x1b[31m\u3053\u3093 \u202e \x9b5m\x7f \U0001f600 e\u0301\n" * 40


def shown(run_dir: Path, width: int = 100, **options: Any) -> str:
    file = io.StringIO()
    inspect(run_dir, Question(**options), Console(file=file, width=width))
    return file.getvalue()


def assert_shows(run_dir: Path, *parts: str, width: int = 120, **options: Any) -> None:
    """Each part is within a line, whatever the width of its blanks, or of a text over lines."""
    lines = [" ".join(line.split()) for line in shown(run_dir, width, **options).splitlines()]
    for part in parts:
        assert part in "\n".join(lines), part


def ids(text: str) -> list[str]:
    return re.findall(r"^(\S+) +reward ", text, re.MULTILINE)


# -- the run --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, (
            "held-out reward 0.250 0.750 0.750 at 4 ▁█",
            "training reward 0.100 0.400 0.400 at 4 ▁▃▆█",
            "exact 0.100 0.400 0.400 at 4 ▁▃▆█",
            "short 0.500 0.500 0.500 at 1 ▁▁▁▁",
            "mismatch kl 0.013 0.013 0.013 at 1 ▁▁▁▁",  # with the sampler, not a reference
            "staleness mean 0.38, greatest 1",
            "drafts acceptance length 1.52, 49% accepted, 6.0 s saved",
            "groups 8 consumed, 1 aborted, 1 unfinished", "idle rollout 10%, learner 30%",
            "left out 1 (reward failed: boom)",
            # Of 55 sampled tokens each; what environments answered is left out.
            "throughput 0.4 trained responses/s, 22 of their tokens/s, median step 10.00 s",
        )),
        # Members have rewards 1 and 0; group 2 has 12 and 102 tokens, of versions 0 and 1.
        ({"step": 2}, (
            "Step 2, over after 0:20", "\nreward 0.2",
            "\n2 █▁ 0.500 57 102 1 consumed 1 2: [b]what is 2?",
            "\n8 █▁ 0.500 63 108 - aborted 1 8: [b]what is 8?",
        )),
        ({"step": 0}, ("No group belongs to it.",)),
        ({"step": 2, "best": 1}, ("Best responses of step 2",)),
        ({"step": 77, "worst": 1}, ("No response of step 77 has a reward.",)),
        ({"worst": 3}, ("8.1 reward 0.000, 108 tokens, cut at the limit, aborted",)),
        ({"group": 4}, (
            "Group 4: prompt 4, epoch 0, trained on in step 3", "[b]what is 4?", "answer = 4",
            "4.0 reward 1.000, 14 tokens, step 3, staleness 1", "[/red] it is 4",
            "4.1 reward 0.000, 104 tokens, cut at the limit, step 3", "exact 1, short 0.5",
            "\n4 0 3 0.500 59",
        )),
        ({"group": 8}, ("aborted: reward failed: boom",)),
        ({"trajectory": "4.0"}, (
            "row 4, epoch 0", "answer = 4", "14 tokens, ended by stop", "1 (exact 1, short 0.5)",
            "trained on in step 3, 1 version old", "[b]what is 4?", "[/red] it is 4",
            "\n0-4 1 rollout-0 -0.500 1.67 5 40.0%", "\n5-13 2 rollout-0 -0.500 1.80 9 44.4%",
        )),
        ({"trajectory": "8.1"}, ("aborted: reward failed: boom",)),
        ({"trajectory": "9.0"}, ("open",)),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_shown(tmp_path, options, parts):
    assert_shows(make_run(tmp_path), *parts, **options)


def test_members_that_were_not_needed_count_with_the_length_they_came_to(tmp_path):
    """Leaving out what was stopped would hide that it is the long ones that are."""
    with stored(tmp_path) as store:
        group(store, 0)
        for member, length in enumerate((3, 4, 5, 6, 60)):
            segment(store, (0, member), length)
            if member < 4:
                reason = "finished_early" if member else "stop"
                finished(store, (0, member), length, 1.0, reason)
        store.put_consumed(0, version=0, members=(0, 1, 2))
    lengths = {each["shortest"]: each for each in found(tmp_path)["by_length"]}
    assert [lengths[n]["consumed"] for n in (3, 4, 5, 6, 60)] == [1, 1, 1, 0, 0]
    assert [lengths[n]["aborted"] for n in (3, 4, 5, 6, 60)] == [0, 0, 0, 1, 1]
    assert [lengths[n]["cut"] for n in (3, 6, 60)] == [0, 1, 0]
    assert (lengths[6]["reward"], lengths[60]["reward"]) == (1.0, None)
    for member in (3, 4):
        assert_shows(tmp_path, "aborted: its group did not need it", trajectory=f"0.{member}")
    assert_shows(tmp_path, "trained on in step 1, 0 versions old", trajectory="0.2")


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("words", [None, ACTS], ids=["plain", "hostile"])
def test_no_line_is_wider_than_the_console_and_no_text_acts_on_it(tmp_path, width, words):
    make_run(tmp_path, num_steps=100, words=words)
    for options in ({}, {"trajectory": "4.0"}, {"worst": 3, "best": 2}, {"step": 2}, {"group": 4}):
        text = shown(tmp_path, width, **options)
        assert max(map(cell_len, text.splitlines())) <= width, options
        assert "…" not in text, f"cut by the console: {options}"
        assert not {"\x1b", "\u202e", "\x9b", "\x7f"} & set(text), options


def test_figures_of_any_size_fit(tmp_path):
    make_run(tmp_path)
    row = {"step": 12345, "time": 1e6, "eval/reward": -1e5, "reward": 1e5, "grad_norm": 1e7}
    row |= {"large": 1e300, "small": -1.5e-9, "none": None}
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    text = shown(tmp_path, width=80)
    assert "-1e+05" in text
    assert "…" not in text
    assert max(map(cell_len, text.splitlines())) <= 80
    parts = "\nlarge 1e+300", "\nsmall -1.5e-09", "\nnone -"
    assert_shows(tmp_path, *parts, width=60, step=12345)


def test_it_opens_with_what_was_learned(tmp_path):
    text = shown(make_run(tmp_path, num_steps=9), width=80)
    (tmp_path / "long").mkdir()
    long = make_run(begun(tmp_path / "long", name="run"), 99, words="many words " * 200)
    assert max(len(each.splitlines()) for each in (text, shown(long))) <= 30, "it fits a screen"
    order = (
        "step 9", "held-out", "Best of step 9: 17.0  reward 1.000, 27 tokens, step 9",
        "Worst of step 9: 17.1  reward 0.000, 117 tokens, cut at the limit, step 9",
        "prompt   [b]what is 17?", "response [/red] it is 17",
        "staleness", "More: --worst N",
    )  # fmt: skip
    place = 0
    for words in order:
        place = text.index(words, place)


def test_it_says_what_limits_the_run(tmp_path):
    make_run(tmp_path)
    assert "limited by" not in shown(tmp_path), "no attempt says at which bound it ran"
    begun(tmp_path, schedule={"name": "synchronous"})
    limited = "limited by rollout: learner idle 30%, instances 10%"
    assert_shows(tmp_path, f"pace {limited} (last 3 steps)")


def test_a_run_that_has_just_begun_and_one_that_rewarded_something(tmp_path):
    store = SqliteTrajectoryStore(tmp_path / "events.db")
    store.commit()
    assert "step 0" in shown(tmp_path)
    assert "So far: 0 prompts, 0 finished responses, 0 rewarded" in shown(tmp_path)
    group(store, 0)
    for member, reward in enumerate((0.5, 0.25, None)):
        finished(store, (0, member), 1 + member, reward, f=1.0)
        store.put_text(TrajectoryId(0, member), "" if member else "said")
    store.commit()  # and the run goes on
    text = shown(tmp_path)
    assert "So far: 1 prompts, 3 finished responses, 2 rewarded, mean reward 0.375" in text
    assert "drafts" not in text
    assert "Best so far: 0.0  reward 0.500, 1 token, waits\n" in text
    assert "Worst so far: 0.1  reward 0.250" in text
    assert "response (empty)" in text
    store.close()


def test_how_far_the_run_is(tmp_path):
    make_run(tmp_path)
    assert ": killed, step 4 after 0:41" in shown(tmp_path)
    begun(tmp_path, name="sums", learner={"max_steps": 9}, schedule={"name": "staleflow"})
    assert "(recipe sums, schedule staleflow): killed, step 4 of 9 after 0:41" in shown(tmp_path)
    begun(tmp_path, name="sums", learner={"max_steps": 4})
    with stored(tmp_path) as store:
        store.record_command(store.record(41.0, [Tick()]), Finish())
    assert ": ended, step 4 of 4 after 0:41\n" in shown(tmp_path)
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "metrics.jsonl").write_text("".join(f"{row}\n" for row in rows[:4]))
    assert "step 3 of 4 after" in shown(tmp_path)
    assert "Best of step 3: " in shown(tmp_path), "the last that is complete"
    (tmp_path / "metrics.jsonl").unlink()
    assert "No step has been completed." in shown(tmp_path)


# -- steps, groups and responses ------------------------------------------------------------------


def test_a_wide_spread_comes_first_and_bars_are_of_the_whole_step(tmp_path):
    with stored(tmp_path) as store:
        for number, rewards in enumerate([(1.0, 1.0), (0.5, 0.0), (None, None), (1.0, -1.0)]):
            group(store, number)
            for member, reward in enumerate(rewards):
                segment(store, (number, member), 1)
                finished(store, (number, member), 1, reward)
            store.put_consumed(number, version=0, members=(0, 1))
    text = shown(tmp_path, step=1)
    found = re.findall(r"^ *(\d) +([▁-█·]+)", text, re.MULTILINE)
    assert found == [("3", "█▁"), ("1", "▆▅"), ("0", "██"), ("2", "··")]
    assert "bars from -1 to 1" in text
    assert "It has no metrics yet." in text


def test_a_prompt_again_and_segments_of_an_environment(tmp_path):
    make_run(tmp_path)
    with stored(tmp_path) as store:
        group(store, 20, row=4, epoch=1, prompt=[{"role": "user", "content": "hi"}])
        group(store, 10)
        for start, length, steps in ((0, 6, 4), (9, 2, 2)):
            segment(store, (10, 0), length, start=start, steps=steps, drafted=steps)
        store.put_observed(TrajectoryId(10, 0), start=6, version=0, tokens=[7] * 3)
    assert_shows(tmp_path, "\n20 1 - - -", group=4)
    nothing = "No token of a response is stored."
    assert_shows(tmp_path, "epoch 1, open", "user: hi", nothing, group=20)
    made = "\n0-5 0 rollout-0 -0.500 1.50 4 50.0%"
    assert_shows(tmp_path, made, f"\n6-8 0 {ENVIRONMENT} - - - -", width=80, trajectory="10.0")


def test_the_worst_and_the_best_can_be_listed(tmp_path):
    make_run(tmp_path)
    # Groups 0 to 7 are trained on, 8 was left out, 9 is open: the newest group comes first.
    assert ids(shown(tmp_path, worst=3)) == ["9.1", "8.1", "7.1"]
    assert ids(shown(tmp_path, best=12)) == [*(f"{g}.0" for g in range(9, -1, -1)), "9.1", "8.1"]
    assert ids(shown(tmp_path, worst=9, step=3)) == ["5.1", "4.1", "5.0", "4.0"]


def test_a_group_of_a_suite(tmp_path, capsys):
    with stored(make_run(tmp_path)) as store:
        answered(store, -1, [0.25, 0.5], row=4, version=2)
    text = shown(tmp_path, trajectory="-1.1")
    assert "evaluated" in text
    assert "row 4, of a suite" in text
    assert "None" not in text
    assert "prompt 4, of a suite, evaluated" in (text := shown(tmp_path, group=-1))
    assert "0.500" in text
    assert found(tmp_path, group=-1)["epoch"] is found(tmp_path, trajectory="-1.0")["epoch"] is None
    assert found(tmp_path, trajectory="-1.1")["earlier"] == [], "groups of training are others"
    assert cli.main(["inspect", str(tmp_path), "--group", "-1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["group"] == -1


# -- mistakes -------------------------------------------------------------------------------------


def test_each_damaged_page_is_told_and_a_defect_is_none(tmp_path):
    path = make_run(tmp_path, num_steps=8) / "events.db"
    contents = path.read_bytes()
    size = int.from_bytes(contents[16:18])
    told: list[str] = []
    for start in range(size, len(contents), size):
        path.write_bytes(contents[:start] + b"\xa5" * size + contents[start + size :])
        for options in ({}, {"worst": 3}, {"trajectory": "1.0"}, {"step": 1}, {"group": 1}):
            try:
                shown(tmp_path, **options)
            except UserError as error:
                told.append(str(error))
    assert sum("damaged" in each for each in told) > 10
    assert all(each.startswith(f"{path}: ") and "\n" not in each for each in told)
    path.write_bytes(contents)
    with pytest.raises(sqlite3.OperationalError), open_undamaged(path) as reader:
        reader.query("SELECT nothing FROM nowhere")


# -- JSON and the command line --------------------------------------------------------------------


def found(run_dir: Path, **options: Any) -> Any:
    text = as_json(run_dir, Question(**options))
    assert text.isascii()
    assert "\x7f" not in text
    return json.loads(text)


def test_json_of_each_thing_has_documented_keys(tmp_path):
    make_run(tmp_path, words=ACTS)
    run, step, whole = found(tmp_path), found(tmp_path, step=2), found(tmp_path, group=4)
    both = found(tmp_path, best=1, worst=2, step=3)
    assert (run["steps"], run["groups"], run["state"], run["ended"]) == (4, 10, "killed", False)
    assert (run["latest"]["reward"], run["held_out"]) == (0.4, [[0, 0.25], [4, 0.75]])
    assert (step["count"], step["metrics"]["reward"], step["time"]) == (3, 0.2, 20.0)
    assert whole["members"][0]["text"] == ACTS
    # 20 responses: 10..19 tokens (stopped, reward 1), 100..109 (cut, reward 0). Groups 8 and 9 of
    # each kind are the longest: aborted and open.
    assert [tuple(each.values()) for each in run["by_length"]][::2] == [
        (10, 13, 4, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0),
        (18, 101, 4, 0.5, 0.5, 0.5, 0.0, 0.25, 0.25),
        (106, 109, 4, 0.0, 1.0, 0.5, 0.0, 0.25, 0.25),
    ]
    (drafts,) = run["drafts"]  # all in one epoch
    assert (drafts["tokens"], drafts["drafted"]) == (1190, 832)
    assert [each["group"] for each in both["worst"]] == [5, 4]
    assert (both["best"][0]["step"], both["best"][0]["columns"]) == (3, {"answer": "5"})
    page = (Path(__file__).parents[2] / "docs" / "inspecting.md").read_text()
    told = dict(re.findall(r"^\| (the run|its `members`|`--\w+`)[^|]* \| (.*) \|$", page, re.M))
    for of, keys in (
        ("the run", run),
        ("`--step`", step),
        ("`--group`", whole),
        ("its `members`", whole["members"][0]),
        ("`--trajectory`", found(tmp_path, trajectory="4.0")),
        ("`--best`", both["best"][0]),
    ):
        assert not set(keys) - set(re.findall(r"\w+", told[of])), of


def test_a_number_that_json_does_not_have_is_null(tmp_path):
    with stored(tmp_path) as store:
        group(store, 0)
        segment(store, (0, 0), 1, logprobs=[-float("inf")])
    assert found(tmp_path, trajectory="0.0")["logprobs"] == [None]


@pytest.mark.parametrize("options", [["--json"], []])
def test_who_reads_only_the_beginning_of_what_is_printed(tmp_path, options):
    run = make_run(tmp_path, words="many words " * 2_000)
    command = [sys.executable, "-m", "rhymeflow", "inspect", str(run), "--best", "9", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() in (1, 141)
