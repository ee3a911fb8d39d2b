"""The live display of a run in a notebook: a bar, what limits the run and what goes on, and a table
with a row a step.

Holds true: one output of the cell is redrawn; of a long run the last rows are shown. Needs IPython,
which a notebook has. Knows nothing of where the numbers come from.
"""

from __future__ import annotations

import html
import importlib
from collections.abc import Callable, Mapping

from rich.console import Console

from rhymeflow.observe.progress import Progress, ProgressState, clock

_REDRAW_SECONDS = 1.0
_ROWS = 50
"""Rows that are shown, the last ones."""

_COLUMNS: Mapping[str, Callable[[ProgressState], str]] = {
    "Step": lambda state: f"{state.step}",
    "Reward": lambda state: _number(state.rewards[-1] if state.rewards else None),
    "Held out": lambda state: _number(state.eval_rewards[-1] if state.eval_rewards else None),
    "Staleness": lambda state: _number(state.staleness_mean),
    "Trained tokens/s": lambda state: _rate(state.trained_tokens_per_s),
    "Rollout tokens/s": lambda state: _rate(state.rollout_tokens_per_s),
    "Time": lambda state: clock(state.elapsed),
}


class NotebookProgress(Progress):
    """Shows a run below a notebook's cell."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._display = importlib.import_module("IPython.display")
        self._handle = self._display.display(self._html("loading"), display_id=True)
        self._rows: list[list[str]] = []
        self._drawn_at, self._drawn_step = -_REDRAW_SECONDS, 0

    def __exit__(self, *_: object) -> None:
        if self._latest is not None:
            self._draw(self._latest)

    def update(self, state: ProgressState) -> None:
        """Show `state`, unless it was shown a moment ago and no step has ended since."""
        self._latest = state
        is_new_step = state.step != self._drawn_step
        if is_new_step:
            self._rows.append([show(state) for show in _COLUMNS.values()])
        if is_new_step or state.elapsed - self._drawn_at >= _REDRAW_SECONDS:
            self._draw(state)

    def _draw(self, state: ProgressState) -> None:
        self._drawn_at, self._drawn_step = state.elapsed, state.step
        self._handle.update(self._html(table(state, self._rows)))

    def _html(self, text: str) -> object:
        return self._display.HTML(text)


def table(state: ProgressState, rows: list[list[str]]) -> str:
    """The display, as HTML."""
    left = "-" if state.left is None else clock(state.left)
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>"
        for row in rows[-_ROWS:]
    )
    pace = "" if state.limit is None else f"{html.escape(state.limit.line)}<br>"
    return (
        f'<div><progress value="{state.step}" max="{state.num_steps}" style="width:300px">'
        f"</progress> {state.step}/{state.num_steps}, {clock(state.elapsed)} elapsed, {left} left"
        f"<br>{pace}{html.escape(state.message)}</div>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def progress_on(console: Console) -> Progress:
    """What shows a run on this console: a table where it is a notebook's."""
    return NotebookProgress(console) if console.is_jupyter else Progress(console)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
