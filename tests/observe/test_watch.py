"""`rhymeflow inspect --watch`: on a terminal and without one, until the end and upon Ctrl-C."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from rhymeflow import cli
from rhymeflow.core.commands import Finish
from rhymeflow.core.events import Tick
from rhymeflow.observe.inspect import Asked
from rhymeflow.observe.watch import watch
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.observe.runs import make_run


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteTrajectoryStore]:
    """Of a run that goes on for as long as this is open."""
    make_run(tmp_path)
    store = SqliteTrajectoryStore(tmp_path / "events.db")
    yield store
    store.close_if_missing()


def console(is_terminal: bool, height: int = 12) -> Console:
    return Console(file=io.StringIO(), width=80, height=height, force_terminal=is_terminal)


def text_of(console: Console) -> str:
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def in_turn(*actions: Callable[[], object]) -> Callable[[float], None]:
    """Stands for `sleep`: one of these each time."""
    left = list(actions)
    return lambda seconds: left.pop(0)() and None  # type: ignore[func-returns-value]


def add_step(run_dir: Path, step: int) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "time": 50.0, "reward": 0.9}) + "\n")


def finish(store: SqliteTrajectoryStore) -> None:
    store.record_command(store.record(60.0, [Tick()]), Finish())
    store.commit()
    store.close()


def interrupt() -> None:
    raise KeyboardInterrupt


def test_without_a_terminal_once_for_each_change(
    tmp_path: Path, store: SqliteTrajectoryStore
) -> None:
    def tick() -> None:
        store.record(55.0, [Tick()])  # changes the time in the headline, and no more
        store.commit()

    out = console(False)
    sleep = in_turn(tick, lambda: add_step(tmp_path, 5), tick, lambda: finish(store))
    watch(tmp_path, Asked(), out, 2.0, sleep=sleep)
    text = text_of(out)
    assert text.count("held-out reward") == 2
    assert text.index("step 4 after") < text.index("step 5 after")
    assert text.endswith("The run has ended.\n")


def test_of_a_group_what_changes_is_its_text(tmp_path: Path, store: SqliteTrajectoryStore) -> None:
    def end() -> None:
        store.put_ending(9, "aborted", version=4, reason="boom")
        store.commit()

    out = console(False)
    sleep = in_turn(lambda: add_step(tmp_path, 5), end, store.close)
    watch(tmp_path, Asked(group=9), out, 2.0, sleep=sleep)
    assert text_of(out).count("Group 9") == 2
    assert text_of(out).endswith("The run was killed: nothing carries it on.\n")


def test_on_a_terminal_as_much_as_the_window_holds_and_all_of_it_at_the_end(
    tmp_path: Path, store: SqliteTrajectoryStore
) -> None:
    out = console(True)
    looks: list[str] = []

    def look() -> None:
        looks.append(text_of(out))

    with pytest.raises(KeyboardInterrupt):
        watch(tmp_path, Asked(), out, 2.5, sleep=in_turn(look, interrupt))
    page = looks[0]
    assert "held-out reward" in page
    assert "Worst responses" not in page, "it is below the window"
    assert "more lines in a higher window; every 2.5 s; Ctrl-C ends this, not the run" in page
    assert page.count("\n") < 12
    assert "Worst responses" in text_of(out)
    assert text_of(out).rindex("\x1b[?25h") > 0, "the cursor is back"


def test_a_look_takes_at_most_a_fifth_of_the_time(
    tmp_path: Path, store: SqliteTrajectoryStore
) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            store.close()

    now = iter([0.0, 3.0, 100.0, 100.1, 200.0])
    watch(tmp_path, Asked(), console(False), 2.0, sleep=sleep, clock=lambda: next(now))
    assert slept == [12.0, 2.0]


def test_a_run_that_is_over_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    make_run(tmp_path)
    assert cli.main(["inspect", str(tmp_path), "--watch"]) == 0
    assert capsys.readouterr().out.count("held-out reward") == 1


def test_ctrl_c_is_one_line_and_130(
    tmp_path: Path,
    store: SqliteTrajectoryStore,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def watched(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rhymeflow.observe.watch.watch", watched)
    assert cli.main(["inspect", str(tmp_path), "--watch", "0.5"]) == 130
    assert capsys.readouterr().err == "rhymeflow: interrupted\n"
