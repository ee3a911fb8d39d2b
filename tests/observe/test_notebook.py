"""A run in a notebook: a table that is redrawn."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from rhymeflow.observe.limits import Limit
from rhymeflow.observe.notebook import NotebookProgress, progress_on
from rhymeflow.observe.progress import Progress, ProgressState


class Drawn:
    """Stands for `IPython.display`: what the cell shows, each time it is drawn."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def display(self, what: str, display_id: bool) -> Drawn:
        assert display_id
        self.update(what)
        return self

    def update(self, what: str) -> None:
        self.shown.append(what)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    drawn, module = Drawn(), ModuleType("IPython.display")
    module.display, module.HTML = drawn.display, str  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return drawn


def state(step: int, elapsed: float, **fields: Any) -> ProgressState:
    rewards = [0.25 * each for each in range(1, step + 1)]
    return ProgressState("run", 4, 1, step, elapsed, rewards=rewards, **fields)


def test_a_row_is_added_for_each_step(drawn: Drawn) -> None:
    with NotebookProgress(Console()) as progress:
        progress.update(state(0, 0.5, message="loading <data>"))
        progress.update(state(1, 0.6))
        progress.update(state(1, 0.7))  # a moment later, and nothing new
        progress.update(state(2, 0.8))
    last = drawn.shown[-1]
    assert len(drawn.shown) == 5  # with the empty one, and the last again
    assert last.count("<tr>") == 3
    assert "<td>0.2500</td>" in last
    assert "<td>0.5000</td>" in last
    assert "2/4" in last
    assert "loading &lt;data&gt;" in drawn.shown[1]


def test_it_says_what_limits_the_run(drawn: Drawn) -> None:
    limit = Limit("rollout", 0.02, 0.5, 8)
    with NotebookProgress(Console()) as progress:
        progress.update(state(1, 0.6, limit=limit))
    assert limit.line in drawn.shown[-1]


def test_only_a_notebook_has_the_table(drawn: Drawn) -> None:
    assert type(progress_on(Console(force_jupyter=False))) is Progress
    assert type(progress_on(Console(force_jupyter=True))) is NotebookProgress
