"""The benchmarks' harness: order of measurements, ratios, and what is reported."""

import argparse
import importlib
import json
import multiprocessing
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from benchmarks import emulated, harness
from rhymeflow.errors import UserError


def test_sides_take_turns_and_the_order_turns_round():
    calls: list[str] = []
    sides = {name: lambda name=name: calls.append(name) or float(len(calls)) for name in "ab"}
    values = harness.interleave(sides, 3)
    assert "".join(calls) == "abbaab"
    assert values == {"a": [1, 4, 5], "b": [2, 3, 6]}


def in_a_folder(place: str) -> None:
    with tempfile.TemporaryDirectory(dir=place):
        Path(place, "begun").touch()
        os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C does to all of a terminal's processes
        time.sleep(60)


def test_a_pool_that_is_interrupted_leaves_no_folders(tmp_path):
    context = multiprocessing.get_context("fork")
    with context.Pool(1, initializer=harness.ended_with_their_pool) as pool:
        pool.apply_async(in_a_folder, [str(tmp_path)])
        deadline = time.monotonic() + 30
        while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len([*tmp_path.iterdir()]) == 2
    assert [each.name for each in tmp_path.iterdir()] == ["begun"]


def test_the_ratio_is_of_pairs():
    assert harness.median_ratio([2, 30, 4], [1, 10, 4]) == 2
    for count, p95 in ((1, 1), (20, 19), (50, 48), (100, 95)):
        assert harness.percentile(list(range(count, 0, -1)), 0.95) == p95, "one that was measured"
    with pytest.raises(ValueError, match="longer"):
        harness.median_ratio([1], [1, 2])


@pytest.mark.parametrize(("value", "met"), [(1.99, False), (2.0, True), (2.1, True)])
def test_a_target_is_met_from_its_value_on(value, met):
    assert harness.Target("x", value, 2.0).met is met
    assert harness.Target("x", 4.0 - value, 2.0, at_most=True).met is met


def test_some_parts_are_measured_and_recorded_under_a_name_of_their_own():
    target = harness.Target("x", 1, 2)
    parts = {name: lambda args, name=name: ([{"part": name}], [target]) for name in "abc"}
    parser = argparse.ArgumentParser()
    harness.add_common_arguments(parser)
    harness.add_parts_argument(parser, parts)
    for given, name in (([], "x"), (["--parts", "a,b,c"], "x"), (["--parts", "b,c"], "x-b-c")):
        result = harness.report_parts("x", parts, parser.parse_args(given), "How.")
        assert result["name"] == name
        assert [row["part"] for row in result["rows"]] == list("bc" if "-" in name else "abc")
        assert len(result["targets"]) == len(result["rows"])
    with pytest.raises(UserError, match=r"--parts: no part 'd'; there are a, b, c$"):
        harness.report_parts("x", parts, parser.parse_args(["--parts", "a,d"]), "How.")


def test_the_report_ends_in_one_json_line(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(harness.sys, "argv", ["/some/where/rhymeflow", "bench", "x", "--record"])
    rows = [harness.side_row("ours", [3.0, 1.0, 2.0], "tokens/s"), {"side": "peer", "note": "none"}]
    args = argparse.Namespace(json=True, record=True)
    harness.report("x", rows, [harness.Target("x/peer", 1.2345, 2)], args, notes="How.")
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    (target,) = result["targets"]
    assert {k: target[k] for k in ("name", "value", "target", "met")} == {
        "name": "x/peer", "value": 1.2345, "target": 2, "met": False
    }  # fmt: skip
    assert result["rows"][0]["median"] == 2.0
    assert result["command"] == "rhymeflow bench x --record"
    assert {"cpu", "cores", "torch", "python"} <= set(result["machine"])
    assert "x/peer: 1.234 (target >= 2: NOT met)" in out
    assert json.loads((tmp_path / "x.json").read_text()) == result
    text = (tmp_path / "x.md").read_text()
    assert "rhymeflow bench x --record" in text
    assert "| peer " in text


@pytest.mark.parametrize("path", sorted(harness.RESULTS.glob("*.json")), ids=lambda p: p.stem)
def test_a_record_says_which_command_made_it_and_the_command_works(path):
    """Today's options take the command, or the one it is now called; or it is archived."""
    result, text = json.loads(path.read_text()), path.with_suffix(".md").read_text()
    assert result["machine"]["cores"]
    assert f"    {result['command']}\n" in text
    if "Archived: the command works at commit `" in text:
        return
    for command in commands(path):
        program, bench, name, *options = shlex.split(command)
        assert (program, bench) == ("rhymeflow", "bench")
        parser = argparse.ArgumentParser(allow_abbrev=False)
        harness.add_common_arguments(parser)
        importlib.import_module(f"benchmarks.{name}").add_arguments(parser)
        options = [sys.executable if option.endswith("/python") else option for option in options]
        assert parser.parse_args(options).record


def commands(record):
    """Those that made it, as they are called today."""
    now = re.search(r"^Now: `([^`]*)`", record.with_suffix(".md").read_text(), re.MULTILINE)
    return (now[1] if now else json.loads(record.read_text())["command"]).split(" && ")


def test_the_page_of_measurements_has_the_commands_of_its_records():
    """As they were or as they are called today; but for what changes no figure."""
    page = (harness.RESULTS.parents[1] / "docs" / "performance.md").read_text()
    rows = [
        line for line in page.splitlines() if "/results/" in line and "`rhymeflow bench" in line
    ]
    assert len(rows) > 20
    for row in rows:
        record = harness.RESULTS / re.search(r"/results/([\w-]+)\.md", row)[1]
        is_archived = "Archived: " in record.with_suffix(".md").read_text()
        if is_archived or record.name == "chaos":
            continue  # runs of the latter accumulate: it has the command of the last
        then = json.loads(record.with_suffix(".json").read_text())["command"].split(" && ")
        made = [*commands(record.with_suffix(".json")), *then]
        made = [re.sub(r" --(record|json|jobs \d)\b", "", each) for each in made]
        made = [re.sub(r"\S+/python", "PATH", each) for each in made]
        assert set(re.findall("`(rhymeflow bench [^`]+)`", row)) <= set(made), record.name


def test_a_record_of_runs_that_accumulate_names_what_made_them():
    rows = [{"setting": name, "seeds": seeds} for name, seeds in (("a", 3), ("a", 2), ("c", 1))]
    a, c = emulated.made_by(rows).split(" && ")
    assert a == "rhymeflow bench emulated --setting a --seeds 3 --record"
    assert c == "rhymeflow bench emulated --setting c --seeds 1 --record"


def test_the_python_of_another_environment_is_looked_at_before_anything_is_measured(tmp_path):
    assert harness.interpreter(sys.executable) == sys.executable
    (tmp_path / "text").write_text("no program")
    for wrong in (tmp_path, tmp_path / "nothing", tmp_path / "text"):
        with pytest.raises(UserError, match=f"{wrong}: there is no such program"):
            harness.interpreter(str(wrong))


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (harness.whole(1), ["1", "20"], ["0", "-1", "1.5", "x", ""]),
        (harness.whole(0), ["0", "3"], ["-1", "x"]),
    ],
)
def test_numbers_that_make_no_sense_are_refused(kind, good, bad):
    assert [kind(text) for text in good] == [float(text) for text in good]
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match=f"given {text}"):
            kind(text)
