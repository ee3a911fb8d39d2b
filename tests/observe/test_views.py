"""`rhymeflow inspect` of a step, a group and the tokens of a response, and all of it as JSON."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from rhymeflow import cli
from rhymeflow.core.types import TrajectoryId
from rhymeflow.errors import UserError
from rhymeflow.observe.colouring import COLOURINGS, coloured
from rhymeflow.observe.inspect import Asked, as_json, inspect
from rhymeflow.observe.tokens import Token
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.observe.runs import make_run

ACTS = "\x1b[31m\u3053\u3093 \u202e \x9b5m\x7f e\u0301\n" * 40


def shown(run_dir: Path, width: int = 100, **options: Any) -> str:
    file = io.StringIO()
    inspect(run_dir, Console(file=file, width=width), **options)
    return file.getvalue()


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


# -- steps ----------------------------------------------------------------------------------------


def test_a_step_has_its_metrics_and_its_groups(tmp_path: Path) -> None:
    text = shown(make_run(tmp_path), step=2, width=120)
    assert "Step 2, over after 0:20" in text
    assert ["reward", "0.2"] in [row[:2] for row in rows(text)]
    assert "entropy                     1.234" in text
    assert "Groups: 3, by spread of reward" in text
    # Members have rewards 1 and 0; group 2 has 12 and 102 tokens, of versions 0 and 1.
    assert ["2", "█▁", "1", "0.500", "57", "102", "1", "consumed", "1", "2", "0",
            "[b]what", "is", "2?"] in rows(text)  # fmt: skip
    assert ["8", "█▁", "1", "0.500", "63", "108", "-", "aborted"] in [row[:8] for row in rows(text)]


def test_figures_of_any_size_fit(tmp_path: Path) -> None:
    make_run(tmp_path)
    row = {"step": 4, "time": 50.0, "large": 1e300, "small": -1.5e-9, "count": 12345, "none": None}
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    text = shown(tmp_path, step=4, width=60)
    for name, figure in (("large", "1e+300"), ("small", "-1.5e-09"), ("count", "12,345")):
        assert [name, figure] in rows(text)
    assert ["none", "-"] in rows(text)
    assert max(map(cell_len, text.splitlines())) <= 60


def test_a_wide_spread_comes_first_and_bars_are_of_the_whole_step(tmp_path: Path) -> None:
    store = SqliteTrajectoryStore(tmp_path / "events.db")
    for group, rewards in enumerate([(1.0, 1.0), (0.5, 0.0), (None, None), (1.0, -1.0)]):
        store.put_group(group, row=0, epoch=0, prompt="p", prompt_tokens=[1], columns={})
        for member, reward in enumerate(rewards):
            which = TrajectoryId(group, member)
            store.put_segment(which, start=0, version=0, instance="r", steps=1, drafted=0,
                              tokens=[1], logprobs=[-1.0])  # fmt: skip
            store.put_finished(which, length=1, reason="stop")
            if reward is not None:
                store.put_reward(which, reward=reward, components={})
        store.put_consumed(group, version=0, members=(0, 1))
    store.commit()
    store.close()
    text = shown(tmp_path, step=1)
    found = [row[:3] for row in rows(text) if row and row[0].isdigit()]
    assert found == [["3", "█▁", "2"], ["1", "▆▅", "0.5"], ["0", "██", "0"], ["2", "··", "-"]]
    assert "bars from -1 to 1" in text
    assert "It has no metrics yet." in text


def test_a_step_that_is_not_there(tmp_path: Path) -> None:
    make_run(tmp_path)
    with pytest.raises(UserError, match="has no step 9; the last one is 4"):
        shown(tmp_path, step=9)
    assert "No group belongs to it." in shown(tmp_path, step=0)


def test_with_best_a_step_keeps_its_meaning(tmp_path: Path) -> None:
    text = shown(make_run(tmp_path), step=2, best=1)
    assert "Best responses of step 2" in text
    assert "Groups" not in text


# -- groups ---------------------------------------------------------------------------------------


def test_a_group_has_its_responses_side_by_side(tmp_path: Path) -> None:
    make_run(tmp_path)
    store = SqliteTrajectoryStore(tmp_path / "events.db")
    store.put_group(20, row=4, epoch=1, prompt="p", prompt_tokens=[1], columns={})
    store.commit()
    store.close()
    text = shown(tmp_path, group=4, width=80)
    lines = text.splitlines()
    assert "Group 4: prompt 4, epoch 0, trained on in step 3" in lines
    assert "[b]what is 4?" in text
    assert "answer = 4" in text
    assert any("4.0 reward 1.000" in line and "4.1 reward 0.000" in line for line in lines)
    assert any("14 tokens, stop" in line and "104 tokens, length" in line for line in lines)
    assert "versions 1 to 2, staleness 1" in text
    assert "exact 1, short 0.5" in text
    assert "[/red] it is 4" in text
    assert ["4", "0", "3", "0.500", "59"] in rows(text)
    assert ["20", "1", "-", "-", "-"] in rows(text)


def test_a_group_without_an_end_or_a_token_and_one_that_is_not_there(tmp_path: Path) -> None:
    make_run(tmp_path)
    store = SqliteTrajectoryStore(tmp_path / "events.db")
    store.put_group(20, row=20, epoch=0, prompt="p", prompt_tokens=[1], columns={})
    store.commit()
    store.close()
    assert "epoch 0, open" in shown(tmp_path, group=20)
    assert "No token of a response is stored." in shown(tmp_path, group=20)
    assert "aborted: reward failed: boom" in shown(tmp_path, group=8)
    with pytest.raises(UserError, match="has no group 99; they go to 20"):
        shown(tmp_path, group=99)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_console_and_no_text_acts_on_it(
    tmp_path: Path, width: int
) -> None:
    make_run(tmp_path, words=ACTS)
    for options in ({"step": 2}, {"group": 4}, {"trajectory": "4.0", "colour": "version"}):
        text = shown(tmp_path, width=width, **options)
        assert max(map(cell_len, text.splitlines())) <= width, options
        # The table of segments needs 80 columns.
        assert "…" not in text or (width < 80 and "trajectory" in options), options
        assert not {"\x1b", "\u202e", "\x9b", "\x7f"} & set(text), options


# -- colours --------------------------------------------------------------------------------------


def token(position: int, text: str, **known: Any) -> Token:
    nothing = {"logprob": None, "learner": None, "accepted": None, "flags": None}
    return Token(position, text, **{"version": 0, "is_observed": False, **nothing, **known})


TOKENS = [
    token(0, "a", logprob=-0.05, learner=-0.04, accepted=False, flags=0),
    token(1, " b", logprob=-0.05, learner=-0.3, accepted=True, flags=1),
    token(2, "\n", is_observed=True, flags=4),
    token(3, "[b]\x1b", version=3, logprob=-9.0, learner=-2.0, accepted=True, flags=2),
]


def drawn(name: str, tokens: list[Token], colours: bool) -> str:
    console = Console(
        file=io.StringIO(),
        width=80,
        force_terminal=colours,
        color_system="256" if colours else None,
    )
    console.print(coloured(name, tokens, console))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("logprob", ["0-1 0.9 or more a b", "2 environment ⏎", "3 below 0.01 [b]\\x1b"]),
        ("difference", ["0 within 0.05 a", "1 0.05 to 0.5 lower b", "2 environment ⏎",
                        "3 0.5 or more higher [b]\\x1b"]),
        ("version", ["0-1 version 0 a b", "2 environment ⏎", "3 version 3 [b]\\x1b"]),
        ("drafts", ["0 sampled alone a", "1 drafted and accepted b", "2 environment ⏎",
                    "3 drafted and accepted [b]\\x1b"]),
        ("loss", ["0 in the loss a", "1 clipped b", "2 masked ⏎", "3 capped [b]\\x1b"]),
    ],
)  # fmt: skip
def test_without_colours_stretches_are_listed_by_what_they_are(
    name: str, expected: list[str]
) -> None:
    _, *lines = drawn(name, TOKENS, colours=False).splitlines()
    assert [" ".join(line.split()) for line in lines] == expected


@pytest.mark.parametrize("name", COLOURINGS)
def test_with_colours_there_is_a_legend_of_what_is_used(name: str) -> None:
    text = drawn(name, TOKENS, colours=True)
    assert "\x1b[" in text
    assert "[b]\\x1b" in text
    for listed in drawn(name, TOKENS, colours=False).splitlines()[1:]:
        words = listed.split(maxsplit=1)[1].split("  ")[0]
        assert f"\u00a0{words}\u00a0" in text
    assert "0.1 to 0.5" not in text, "no token is of it"


def test_what_is_not_known_of_any_token_is_said() -> None:
    bare = [token(0, "a", logprob=-0.5)]
    for name in ("difference", "drafts", "loss"):
        with pytest.raises(UserError, match=f"--colour {name}: .*run.token_details"):
            drawn(name, bare, colours=False)
    assert "not known" in drawn("drafts", [*bare, token(1, "b", accepted=True)], colours=False)


def test_levels_of_log_probabilities() -> None:
    found = []
    for logprob in (-0.1, -0.2, -0.7, -2.4, -4.7):
        table = drawn("logprob", [token(0, "a", logprob=logprob)], colours=False)
        found.append(table.splitlines()[1].removeprefix("0").removesuffix("a").strip())
    assert found == ["0.9 or more", "0.5 to 0.9", "0.1 to 0.5", "0.01 to 0.1", "below 0.01"]


def test_where_there_is_no_tokenizer_numbers_are_shown(tmp_path: Path) -> None:
    text = shown(make_run(tmp_path), trajectory="4.0", colour="version")
    assert "The run's tokenizer cannot be loaded here: numbers of tokens." in text
    assert ["0-4", "version", "1", "⟨7⟩⟨7⟩⟨7⟩⟨7⟩⟨7⟩"] in rows(text)
    assert "[/red] it is 4" not in text, "the tokens stand for it"


# -- what goes together, and JSON ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"group": 1, "trajectory": "1.0"}, "--trajectory 1.0 and --group 1: do not go together"),
        ({"group": 1, "step": 2}, "--group 1 and --step 2: do not go together"),
        ({"trajectory": "1.0", "best": 2}, "--trajectory 1.0 and --best 2: do not go together"),
        ({"trajectory": "1.0", "step": 2}, "--trajectory 1.0 and --step 2: do not go together"),
        ({"group": 1, "worst": 2}, "--group 1 and --worst 2: do not go together"),
        ({"colour": "loss"}, "--colour loss: goes with --trajectory"),
        ({"trajectory": "1.0", "colour": "los"}, "did you mean loss"),
        ({"trajectory": "1"}, "is not GROUP.MEMBER"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Asked(**options)


def test_json_of_each_thing(tmp_path: Path) -> None:
    make_run(tmp_path, words=ACTS)

    def found(**options: Any) -> Any:
        text = as_json(tmp_path, Asked(**options))
        assert text.isascii()
        assert "\x7f" not in text
        return json.loads(text)

    run = found()
    assert (run["steps"], run["groups"], run["state"], run["ended"]) == (4, 10, "killed", False)
    assert run["endings"] == {"aborted": 1, "consumed": 8, "open": 1}
    assert run["latest"]["reward"] == 0.4
    assert run["held_out"] == [[0, 0.25], [4, 0.75]]
    assert run["staleness"] == {"0": 10, "1": 6}
    step = found(step=2)
    assert [group["group"] for group in step["groups"]] == [2, 3, 8]
    assert (step["count"], step["metrics"]["reward"], step["time"]) == (3, 0.2, 20.0)
    group = found(group=4)
    assert group["members"][0]["text"] == group["prompt"] == ACTS
    assert group["members"][1]["components"] == {"exact": 0.0, "short": 0.5}
    assert len(found(trajectory="4.1")["tokens"]) == 104
    both = found(best=1, worst=2, step=3)
    assert [each["group"] for each in both["worst"]] == [5, 4]
    assert (both["best"][0]["step"], both["best"][0]["columns"]) == (3, {"answer": "5"})
    with pytest.raises(UserError, match="--colour loss and --json"):
        found(trajectory="4.1", colour="loss")


def test_the_keys_of_json_are_documented(tmp_path: Path) -> None:
    make_run(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "inspecting.md").read_text()
    told = dict(re.findall(r"^\| (the run|its `members`|`--\w+`)[^|]* \| (.*) \|$", page, re.M))
    group = json.loads(as_json(tmp_path, Asked(group=4)))
    for of, keys in (
        ("the run", json.loads(as_json(tmp_path, Asked()))),
        ("`--step`", json.loads(as_json(tmp_path, Asked(step=2)))),
        ("`--group`", group),
        ("its `members`", group["members"][0]),
        ("`--trajectory`", json.loads(as_json(tmp_path, Asked(trajectory="4.0")))),
        ("`--best`", json.loads(as_json(tmp_path, Asked(best=1)))["best"][0]),
    ):
        assert not set(keys) - set(re.findall(r"\w+", told[of])), of


def test_a_number_that_json_does_not_have_is_null(tmp_path: Path) -> None:
    store = SqliteTrajectoryStore(tmp_path / "events.db")
    store.put_group(0, row=0, epoch=0, prompt="p", prompt_tokens=[1], columns={})
    store.put_segment(TrajectoryId(0, 0), start=0, version=0, instance="r", steps=1, drafted=0,
                      tokens=[1], logprobs=[-float("inf")])  # fmt: skip
    store.commit()
    store.close()
    found = json.loads(as_json(tmp_path, Asked(trajectory="0.0")))
    assert found["logprobs"] == [None]


def test_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(make_run(tmp_path))
    assert cli.main(["inspect", run, "--group", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["group"] == 4
    assert cli.main(["inspect", run, "--trajectory", "4.0", "--color", "version"]) == 0
    assert "version 1" in capsys.readouterr().out
    for arguments, said in (
        (["--json", "--watch"], "--json and --watch: do not go together"),
        (["--watch", "runs"], "seconds, more than 0 (RUN_DIR goes before it)"),
        (["--watch", "0"], "seconds, more than 0"),
        (["--step", "-1"], "should be a number from 0 on"),
    ):
        assert cli.main(["inspect", run, *arguments]) == 2
        assert said in capsys.readouterr().err
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    for no_color, has_codes in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", no_color)
        assert cli.main(["inspect", run, "--trajectory", "4.0", "--colour", "version"]) == 0
        assert ("\x1b[" in capsys.readouterr().out) == has_codes
