"""What all tests share.

They run in as many processes as there are cores; each file stays in one of them, and the files with
real runs, which take longest, come first. Each process and its workers compute with one thread."""

import gc
import os
import runpy
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it when it is imported


import pytest
from hypothesis import settings

# Asserts of helpers say what they compared, as those of test files do.
pytest.register_assert_rewrite("tests.engine", "tests.runtime", "tests.store", "tests.weights")

# How long an example takes depends on what else the machine does.
settings.register_profile("rhymeflow", deadline=None)
settings.load_profile("rhymeflow")


@pytest.fixture
def refused(capsys):
    """Run a command that is refused: nothing is printed but one line on stderr, which is returned.
    `stray`: what a user's file prints may stand before it."""
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


@pytest.fixture
def run_script(capsys, monkeypatch, tmp_path):
    """What `python SCRIPT ...` prints in `tmp_path`; here, where all is imported already."""

    def run(script: Path, *arguments: str | Path) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        runpy.run_path(str(script), run_name="__main__")
        return str(capsys.readouterr().out)

    return run


@pytest.fixture(autouse=True)
def gpu(request):
    """Of tests marked `gpu`; those in `tests/gpu_paths` run on a simulated one."""
    if request.node.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True, scope="session")
def workers_that_have_loaded_all():
    """Workers of these tests are forked from one server, which has loaded all that they run."""
    from rhymeflow.runtime import processes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "PRELOAD", ["rhymeflow.workers.preload", "tests.loaded"])
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that have slow tests, so that none of them is left alone at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_configure() -> None:
    """To look for garbage would make the imports of all tests a quarter longer."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What was imported stays: no collection of garbage looks at it again."""
    gc.freeze()
    gc.enable()
