"""A synthetic run is a store like any other, and every kind of question to it is answered."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.logs.asked import kinds, look
from benchmarks.logs.made_up import Size, build_log
from benchmarks.training.train import ROOT
from rhymeflow.dashboard.run import Run
from tests.dashboard.conftest import serving

SIZE = Size(num_responses=1_600, tokens=20, rows=100, instances=3, is_varied=True)
NEVER_EMPTY = {
    *("groups: of a step", "groups: of a row", "groups: text, a word", "groups: text of all"),
    *("groups: text, two words", "log: whole", "log: any page", "log: of a group"),
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "large"
    folder.mkdir()
    build_log(folder, SIZE, {"rollout.num_generations": "4", "learner.groups_per_batch": "8"})
    return folder


def test_an_audit_finds_nothing(large: Path) -> None:
    script = str(ROOT / "examples" / "audit_run.py")
    done = subprocess.run([sys.executable, script, str(large)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "all hold so far" in done.stdout


def test_every_kind_of_question_is_answered(large: Path) -> None:
    draw = random.Random(0)

    class Board:
        """Asks about the one run."""

        def ask(self, path: str = "", **query: Any) -> Any:
            given = {name: value for name, value in query.items() if value is not None}
            return client.ask(f"runs/large{path}", **given)

    with serving([Run(large, large.name)]) as client:
        board: Any = Board()
        known = look(board, draw)
        for kind, question in kinds(known, draw).items():
            for _ in range(4):
                path, query = question()
                answer = board.ask(path, **query)
                if kind in NEVER_EMPTY:
                    assert answer["groups" if kind.startswith("groups") else "rows"], kind
