"""What is wrong with a command that looks at runs is one line, and nothing is written."""

from collections.abc import Callable

import pytest

from tests.export.made import MadeRun, model
from tests.observe.runs import made

Refused = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`run` and `bare`, which has no metrics; `said` has a response."""
    found = tmp_path_factory.mktemp("runs")
    made(found / "run")
    (made(found / "bare") / "metrics.jsonl").unlink()
    said = MadeRun(found / "said", model(found / "model"))
    said.group(0)
    said.response(0, 0, "a<eos>")
    said.close()
    return found


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("inspect nowhere", "nowhere: no such directory"),
        ("inspect model", "model: is not a run directory"),
        ("inspect run --step -1", "should be a number from 0 on"),
        ("inspect run --step 9", "has no step 9; the last one is 4"),
        ("inspect run --group 1 --trajectory 1.0", "--trajectory 1.0 and --group 1: do not go tog"),
        ("inspect run --group 1 --step 2", "--group 1 and --step 2: do not go together"),
        ("inspect run --trajectory 1.0 --best 2", "--trajectory 1.0 and --best 2: do not go tog"),
        ("inspect run --trajectory 1.0 --step 2", "--trajectory 1.0 and --step 2: do not go tog"),
        ("inspect run --group 1 --worst 2", "--group 1 and --worst 2: do not go together"),
        ("inspect run --worst 0", "--worst 0: should be 1 or more"),
        ("inspect run --best=-1", "--best -1: should be 1 or more"),
        ("inspect run --trajectory 12", "is not GROUP.MEMBER"),
        ("inspect run --trajectory 77.0", "has no trajectory"),
        ("inspect run --group 99", "has no group 99; they go to 9"),
        ("runs nowhere", "nowhere: no such directory"),
        ("runs", "runs: no such directory"),
        ("runs model", "holds no run"),
        ("plot run --metric entrpy", "--metric entrpy: no run has it; did you mean entropy?"),
        ("plot run --output curves.gif", "should end in .png or .svg"),
        ("plot run --output no/curves.png", "--output no/curves.png: cannot be written"),
        ("plot run --smooth 0", "given '0', should be a number from 1 on"),
        ("plot run nowhere", "nowhere: no such directory"),
        ("plot bare", "there are no metrics yet"),
        ("export said", "--output"),
        ("export model --output r.jsonl", "is not a run directory"),
        ("export said --output rows", "say --format jsonl, parquet, datasets"),
        ("export said --output no/rows.jsonl", "there is no directory no"),
        ("export said --output r.jsonl --steps 5:2", "given '5:2', should be A:B"),
        ("export said --output r.jsonl --best 0", "given '0', should be a number from 1 on"),
        ("export said --output r.jsonl --min-reward nan", "given 'nan', should be a number"),
        ("export said --output r.jsonl --what preferences --best 2", "--best: a pair is"),
        ("export said --output r.jsonl --what sft --tokens", "--tokens: goes with"),
        ("export said --output r.jsonl --steps 70:", "no row of trajectories to write: 1 not want"),
    ],
)
def test_mistakes_are_one_line(folder, line, message, refused, monkeypatch):
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    assert message in refused(*line.split())
    assert sorted(folder.iterdir()) == before
