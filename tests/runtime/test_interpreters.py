"""Workers in an interpreter of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rhymeflow.config import Config
from rhymeflow.errors import UserError
from rhymeflow.runtime import local
from rhymeflow.runtime.base import Received, Resources, WorkerLost
from rhymeflow.runtime.local import LocalRuntime
from rhymeflow.workers import launch
from rhymeflow.workers.messages import Alive, Failed


def in_python(python: str) -> Config:
    return Config.model_validate({"rollout": {"python": python}})


def test_only_instances_have_one() -> None:
    config = in_python(sys.executable)
    assert local.needs_interpreter("rollout", config)
    assert not local.needs_interpreter("learner", config)
    assert not local.needs_interpreter("rollout", Config())
    assert local.needs_interpreter(
        "rollout", Config.model_validate({"rollout": {"engine": "vllm"}})
    )


def test_it_is_given_its_task_and_reports_what_it_dies_of(tmp_path: Path) -> None:
    """An instance that is told to end before it has joined, in another interpreter."""
    with LocalRuntime(in_python(sys.executable), tmp_path, tmp_path / "logs") as runtime:
        worker = runtime.start("rollout", "rollout-0", Resources(1))
        command = Path(f"/proc/{worker.pid}/cmdline").read_bytes().split(b"\0")
        assert b"rhymeflow.workers.launch" in command
        runtime._workers["rollout-0"].connection.send_bytes(b"no message")
        news = runtime.wait(60)
        while not isinstance(news[-1], WorkerLost):  # which may come with what it said
            more = runtime.wait(60)
            assert more
            news = [*news, *more]
        said = [item.message for item in news if isinstance(item, Received)]
        (failed,) = (message for message in said if not isinstance(message, Alive))
        assert isinstance(failed, Failed)
        assert "ValidationError" in failed.error
        assert news[-1].worker == "rollout-0"


def test_what_it_prints_before_it_has_a_log_is_in_its_log(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho there is no torch >&2\nexit 3\n")
    broken.chmod(0o755)
    with LocalRuntime(in_python(str(broken)), tmp_path, tmp_path / "logs") as runtime:
        runtime.start("rollout", "rollout-0", Resources(1))
        (lost,) = runtime.wait(30)
        assert isinstance(lost, WorkerLost)
        assert "exit code 3" in lost.reason
        assert (tmp_path / "logs" / "rollout-0.log").read_text() == "there is no torch\n"


def test_openmp_is_loaded_where_it_is_and_once(tmp_path: Path) -> None:
    assert launch.missing_openmp(tmp_path, {}) is None
    library = tmp_path / "lib" / launch.OPENMP
    library.parent.mkdir()
    library.touch()
    assert launch.missing_openmp(tmp_path, {}) == library
    assert launch.missing_openmp(tmp_path, {"LD_PRELOAD": f"a.so:{library}"}) is None


def test_a_python_that_is_not_there_is_refused() -> None:
    from rhymeflow.engine.vllm.installed import check_installed

    with pytest.raises(UserError, match=r"rollout\.python = '/no/python': there is no such"):
        check_installed(in_python("/no/python"))
