"""What all tests share.

They run in as many processes as there are cores; each file stays in one of them, and the files with
real runs, which take longest, come first. Each process and its workers compute with one thread.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it when it is imported

from collections.abc import Callable

import pytest
from hypothesis import settings

# Asserts of helpers say what they compared, as those of test files do.
pytest.register_assert_rewrite("tests.engine", "tests.runtime", "tests.store", "tests.weights")

# How long an example takes depends on what else the machine does.
settings.register_profile("rhymeflow", deadline=None)
settings.load_profile("rhymeflow")


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that is refused: nothing is printed but one line on stderr, which is returned.

    `stray`: what a user's file prints may stand before it.
    """
    from rhymeflow import cli

    def run(*arguments: str, stray: bool = False) -> str:
        assert cli.main(list(arguments)) == 2
        out, err = capsys.readouterr()
        assert not out
        lines = err.splitlines()
        assert len(lines) == 1 or stray
        assert lines[-1].startswith("rhymeflow: ")
        return str(lines[-1])

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that have slow tests, so that none of them is left alone at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
