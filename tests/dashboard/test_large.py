"""A synthetic run is a store like any other, and every kind of question to it is answered."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.dashboard import kinds
from benchmarks.logs.made_up import Size, build_log
from rhymeflow.dashboard.run import Run
from tests.dashboard.conftest import serving

SIZE = Size(num_responses=1_600, tokens=20, rows=100, instances=3, is_varied=True)
NEVER_EMPTY = {
    *(
        "groups: of a step, by spread",
        "groups: of a row",
        "groups: text, a word",
        "groups: text of all",
    ),
    *("groups: text, two words", "log: whole", "log: any page", "log: of a group"),
}


def test_every_kind_of_question_is_answered(tmp_path: Path) -> None:
    few = {"rollout.num_generations": "4", "learner.groups_per_batch": "8"}
    build_log(tmp_path, SIZE, few)
    draw = random.Random(0)
    with serving([Run(tmp_path, "large")]) as client:

        def ask(path: str = "", **query: Any) -> Any:
            return client.ask(f"runs/large{path}", **query)

        board: Any = SimpleNamespace(ask=ask)
        for kind, question in kinds(board, draw).items():
            for _ in range(4):
                path, query = question()
                answer = ask(path, **query)
                if kind in NEVER_EMPTY:
                    assert answer["groups" if kind.startswith("groups") else "rows"], kind
