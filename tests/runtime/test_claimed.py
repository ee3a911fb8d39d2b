"""A run directory belongs to one run, whoever else begins at the same moment."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rhymeflow.config import Config
from rhymeflow.errors import UserError
from rhymeflow.runtime.start import claimed


def test_runs_that_start_in_the_same_second_have_a_directory_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    barrier = threading.Barrier(4)

    def run(seed: int) -> Path:
        barrier.wait()
        with claimed(Config()) as (path, _):
            (path / "config.yaml").write_text(str(seed))
            barrier.wait()
            assert (path / "config.yaml").read_text() == str(seed)
        return path

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(run, range(4)))) == 4
    assert len(list(Path("runs").glob("*/events.db"))) == 4


def test_of_several_runs_with_one_directory_one_has_it(tmp_path):
    path = tmp_path / "out"

    def begin() -> None:
        with claimed(Config(), path):
            raise AssertionError

    with claimed(Config(), path):
        (path / "config.yaml").write_text("first")
        with pytest.raises(UserError, match="out holds a run in progress; name another"):
            begin()
    with pytest.raises(UserError, match="holds a run already"):
        begin()
    assert (path / "config.yaml").read_text() == "first"
    assert (path / "events.db").is_file()


def test_of_a_run_that_never_trained_the_log_that_its_error_names_remains(tmp_path):
    path = tmp_path / "out"

    def begin() -> None:
        with claimed(Config(), path):
            (path / "logs").mkdir(exist_ok=True)
            for name in ("environment.log", "reward.log"):
                (path / "logs" / name).write_text("why")
            raise UserError(f"what it printed is in {path / 'logs' / 'environment.log'}")

    for _ in range(2):  # the directory is free for the next
        with pytest.raises(UserError, match="what it printed"):
            begin()
        assert [f.name for f in path.rglob("*")] == ["logs", "environment.log"]
