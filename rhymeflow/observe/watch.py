"""`rhymeflow inspect --watch`: what is asked of a run, shown anew until the run ends.

Holds true: on a terminal it is redrawn in place, cut at the window's height, and what was shown
last stays there in full; without one it is printed once for each change, of a run itself for each
row of metrics. A look takes at most a fifth of the time, however large the run is. The run is not
disturbed. Time is an argument.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from rhymeflow.observe import metrics
from rhymeflow.observe.inspect import Asked, show
from rhymeflow.observe.runs import State, state_of
from rhymeflow.store.damage import open_undamaged
from rhymeflow.store.previous_run import store_of

_REST = 4
"""Times as long as a look took pass until the next, at least."""
_FOOTER_LINES = 2


class _Look(NamedTuple):
    state: State
    text: str
    """With escape codes, where the console has colours."""
    mark: object
    """Other than that of the look before, if something has changed."""


def watch(
    run_dir: Path,
    asked: Asked,
    console: Console,
    seconds: float,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Show what is asked every so many seconds, until the run is carried on by nobody.

    Raises:
        UserError: see `inspect`.
        KeyboardInterrupt: the user does not want more.
    """
    looks = _looks(run_dir, asked, console, seconds, sleep, clock)
    if console.is_terminal:
        last = _redraw(looks, console, seconds)
    else:
        last = _print_changes(looks, console)
    console.print(_over(last.state))


def _redraw(looks: Iterator[_Look], console: Console, seconds: float) -> _Look:
    last = None
    try:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            for last in looks:
                live.update(_page(last, console, seconds), refresh=True)
    finally:
        if last is not None:
            console.print(Text.from_ansi(last.text))
    assert last is not None
    return last


def _print_changes(looks: Iterator[_Look], console: Console) -> _Look:
    last = None
    for look in looks:
        if last is None or look.mark != last.mark:
            console.print(Text.from_ansi(look.text))
        last = look
    assert last is not None
    return last


def _looks(
    run_dir: Path,
    asked: Asked,
    console: Console,
    seconds: float,
    sleep: Callable[[float], None],
    clock: Callable[[], float],
) -> Iterator[_Look]:
    """At least one, and the last one of a run that nobody carries on."""
    while True:
        began = clock()
        look = _look(run_dir, asked, console)
        yield look
        if look.state != "running":
            return
        sleep(max(seconds, _REST * (clock() - began)))


def _look(run_dir: Path, asked: Asked, console: Console) -> _Look:
    # The state first: what is shown of a run that has ended is then all of it.
    with open_undamaged(store_of(run_dir)) as reader:
        state = state_of(run_dir, reader)
    mark: object = sum(1 for _ in metrics.rows(run_dir)) if asked.is_run else None
    page = Console(
        file=io.StringIO(),
        width=console.width,
        force_terminal=console.is_terminal,
        color_system=console.color_system,  # type: ignore[arg-type]  # a name of its own
        no_color=console.no_color,
    )
    show(run_dir, asked, page, shortly=True)
    text = page.file.getvalue().rstrip("\n")  # type: ignore[attr-defined]
    return _Look(state, text, text if mark is None else mark)


def _page(look: _Look, console: Console, seconds: float) -> Group:
    """As much as the window holds, from the top, and what it is."""
    lines = Text.from_ansi(look.text).split("\n")
    room = max(console.height - _FOOTER_LINES, 1)
    cut = len(lines) - room
    below = f"{cut} more lines in a higher window; " if cut > 0 else ""
    footer = Text(f"{below}every {seconds:g} s; Ctrl-C ends this, not the run", style="dim")
    footer.truncate(console.width, overflow="ellipsis")
    return Group(Text("\n").join(lines[:room]), footer)


def _over(state: State) -> Text:
    said = {"ended": "The run has ended.", "stopped": "The run was stopped."}
    return Text(said.get(state, "The run was killed: nothing carries it on."))


__all__ = ["watch"]
