"""Takes away what a run leaves that a mistake of the user's ended before anything was trained.

Holds true: only what the run itself wrote is removed; a run of which a step was trained on keeps
everything, and so does one that a worker's death ended, whose logs say why.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from rhymeflow.config import Config
from rhymeflow.errors import UserError
from rhymeflow.observe.summary import Summary
from rhymeflow.runtime.observer import Observer
from rhymeflow.runtime.run_dir import choose_run_dir
from rhymeflow.runtime.start import check_start


def leaves_nothing_untrained(train: Callable[..., Summary]) -> Callable[..., Summary]:
    """Wrap `train(config, run_dir=, console=, observer=)`: look for mistakes first, clean up after
    late ones.

    What is wrong and can be seen at once is said before there is a run directory.
    """

    @functools.wraps(train)
    def wrapped(
        config: Config,
        *,
        run_dir: Path | None = None,
        console: Console | None = None,
        observer: Observer | None = None,
    ) -> Summary:
        path = run_dir or choose_run_dir(config)
        check_start(config, path)
        before = {path, *path.rglob("*")} if path.exists() else set()
        parents = [each for each in path.parents if not each.exists()]
        try:
            return train(config, run_dir=path, console=console, observer=observer)
        except UserError:
            if not was_trained(path):
                _remove(path, before)
                for parent in parents:
                    _remove_if_empty(parent)
            raise

    return wrapped


def was_trained(path: Path) -> bool:
    """Whether the run directory's summary counts a step."""
    try:
        return bool(json.loads((path / "summary.json").read_text())["steps"])
    except (FileNotFoundError, NotADirectoryError):
        return False


def _remove(path: Path, before: set[Path]) -> None:
    """Remove what is in a directory and was not there before; then itself, likewise."""
    if not path.is_dir():
        return
    for each in path.iterdir():
        if each in before:
            if each.is_dir():
                _remove(each, before)
        elif each.is_dir():
            shutil.rmtree(each)
        else:
            each.unlink()
    if path not in before:
        path.rmdir()


def _remove_if_empty(path: Path) -> None:
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()
