"""Worker processes of one machine: what one finds when it begins, and how its end is noticed."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from rhymeflow.config import Config
from rhymeflow.engine.vllm.installed import check_installed
from rhymeflow.errors import UserError
from rhymeflow.runtime import local, processes
from rhymeflow.runtime.base import Received, Resources, WorkerLost
from rhymeflow.runtime.local import LocalRuntime
from rhymeflow.utils import gpus, shared_memory
from rhymeflow.workers import launch
from rhymeflow.workers.messages import Alive, Failed
from tests.processes import is_running


@pytest.fixture(params=["forked", "spawned"])
def runtime(tmp_path, monkeypatch, request):
    """As in a real run, with the roles of `tests.runtime.roles`."""
    if request.param == "spawned":
        monkeypatch.setattr(processes, "can_fork", lambda: False)
    monkeypatch.setattr(local.entry, "enter", enter)
    with LocalRuntime(Config(), tmp_path, tmp_path / "logs") as runtime:
        yield runtime


def enter(connection, given, environment):
    """In the child: `entry.enter`, to which the tests' roles are known; no heartbeat is heard."""
    from rhymeflow.workers import entry
    from tests.runtime import roles

    role = given.role
    sys.modules[f"rhymeflow.workers.{role}"] = ModuleType(role)
    sys.modules[f"rhymeflow.workers.{role}"].main = getattr(roles, role)
    entry.beating = nullcontext
    entry.enter(connection, given, environment)


def until(runtime, count, **options):
    news, deadline = [], time.monotonic() + 60
    while len(news) < count:
        assert time.monotonic() < deadline
        news += runtime.wait(1.0, **options)
    return news


def test_a_worker_has_the_threads_it_was_given_and_the_controllers_environment(
    runtime, monkeypatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("MKL_NUM_THREADS", "1")
    monkeypatch.setenv("SOMETHING", "new")
    for name, num_threads in (("v", 1), ("w", 2)):  # torch takes no more than there are cores
        runtime.start("environment", name, Resources(num_threads))
    assert os.environ["OMP_NUM_THREADS"] == "3", "the controller's own environment stays"
    said: dict[str, object] = {}
    while len(said) < 2:  # that one has ended may be heard before what the other says
        news = until(runtime, 1)
        said |= {item.worker: item.message for item in news if isinstance(item, Received)}
    assert said["v"] == Failed("1 threads, new, True", user_error=True)
    assert said["w"] == Failed("2 threads, new, True", user_error=True)


def test_a_worker_sees_the_gpus_of_its_number_and_no_others(runtime, monkeypatch):
    """Where others that it must not see are named in the controller's environment."""
    monkeypatch.setenv(gpus.VISIBLE, "3,1,0,2")
    monkeypatch.setattr(runtime, "_gpus", ("3", "1", "0", "2"))
    split = {"engine": "vllm", "vllm_tensor_parallel_size": 2}
    monkeypatch.setattr(runtime, "_config", Config.model_validate({"rollout": split}))
    monkeypatch.setattr(local, "needs_interpreter", lambda *_: False)
    runtime.start("learner", "learner.1", Resources(1))
    runtime.start("learner_rank", "learner.1-rank-1", Resources(1, number=1))
    runtime.start("rollout", "rollout-0.3", Resources(1, number=0))
    said: set[str] = set()
    while len(said) < 3:
        news = until(runtime, 1)
        said |= {item.message.error for item in news if isinstance(item, Received)}
    assert said == {"learner.1 sees 3", "learner.1-rank-1 sees 1", "rollout-0.3 sees 1,0"}


def test_what_a_worker_said_is_heard_before_its_end_and_its_end_once(runtime):
    worker = runtime.start("talkative", "w", Resources(1))
    first, second = until(runtime, 2)
    assert (first, second) == (Received("w", Alive()), Received("w", Alive()))
    if sys.platform == "linux":
        assert Path(f"/proc/{worker.pid}/comm").read_text() == "rf:w\n"
    os.kill(worker.pid, signal.SIGKILL)
    (loss,) = until(runtime, 1)
    assert isinstance(loss, WorkerLost)
    assert "w died (killed by SIGKILL)" in loss.reason
    assert worker.log in loss.reason
    assert runtime.wait(0.1) == []
    runtime.stop("w", patience=0.0)


CONTROLLER = """
import sys, time
from pathlib import Path
from rhymeflow.config import Config
from rhymeflow.runtime import local, processes
from rhymeflow.runtime.base import Resources
from tests.runtime.test_local import enter

processes.prepare()
local.entry.enter, run_dir = enter, Path(sys.argv[1])
runtime = local.LocalRuntime(Config(), run_dir, run_dir / "logs")
worker = runtime.start("busy", "w", Resources(1))
while not runtime.wait(1.0):
    pass
print(worker.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is no file elsewhere")
def test_a_worker_that_listens_to_nobody_ends_with_its_controller(tmp_path):
    """In silence: what it leaves is taken away without a word on the terminal."""
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, tmp_path],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    worker = int(controller.stdout.readline())
    memory = shared_memory.DIRECTORY / (tmp_path / "memory").read_text()
    assert memory.exists()
    controller.kill()
    _, said = controller.communicate(timeout=60)  # whoever had its terminal has ended
    assert not is_running(worker)
    assert said == ""
    assert not memory.exists()


def test_nothing_is_delivered_once_a_worker_is_stopped(runtime, monkeypatch):
    """Its descriptor's number may be another's by then, who would be told to shut down."""
    written = []

    def slowly(self, message):
        time.sleep(0.5)
        assert not self.closed
        written.append(message)

    monkeypatch.setattr(Connection, "send_bytes", slowly)
    runtime.start("silent", "w", Resources(1))
    runtime.stop("w", patience=0.0)
    count = len(written)
    time.sleep(1.0)
    assert len(written) == count == 1


def test_what_another_thread_starts_while_the_run_ends_ends_too(runtime):
    """Ctrl-C while workers start: the program waited for the last one for ever."""
    runtime.close()
    with pytest.raises(RuntimeError, match="the run has ended"):
        runtime.start("silent", "late", Resources(1))
    assert "late" not in {child.name for child in multiprocessing.active_children()}


def test_the_server_is_another_once_libraries_would_read_something_else(monkeypatch):
    done = []
    server = SimpleNamespace(_stop=lambda: done.append("stop"))
    fake = SimpleNamespace(ensure_running=lambda: done.append("start"))
    monkeypatch.setattr(processes, "forkserver", fake)
    monkeypatch.setattr(processes, "_SERVER", server)
    monkeypatch.setattr(processes, "_started_with", None)
    processes.prepare()
    monkeypatch.setenv("SOMETHING", "else")
    processes.prepare()
    assert done == ["start", "start"], "the second does nothing while the first runs"
    monkeypatch.setenv("HF_HOME", "elsewhere")
    processes.prepare()
    assert done[2:] == ["stop", "start"]


def test_ctrl_c_while_the_server_loads_is_the_runs():
    """Else the server, which is in the terminal's foreground too, prints a traceback."""
    code = (
        "import importlib, signal\n"
        "def load(name): assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN\n"
        "importlib.import_module = load\n"
        "import rhymeflow.workers.preload"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- in an interpreter of their own ---------------------------------------------------------------


def in_python(python: str) -> Config:
    return Config.model_validate({"rollout": {"python": python}})


def test_only_instances_have_one():
    config = in_python(sys.executable)
    assert local.needs_interpreter("rollout", config)
    assert not local.needs_interpreter("learner", config)
    assert not local.needs_interpreter("rollout", Config())
    assert local.needs_interpreter(
        "rollout", Config.model_validate({"rollout": {"engine": "vllm"}})
    )


def test_it_is_given_its_task_and_reports_what_it_dies_of(tmp_path):
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


def test_what_it_prints_before_it_has_a_log_is_in_its_log(tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho there is no torch >&2\nexit 3\n")
    broken.chmod(0o755)
    with LocalRuntime(in_python(str(broken)), tmp_path, tmp_path / "logs") as runtime:
        runtime.start("rollout", "rollout-0", Resources(1))
        (lost,) = runtime.wait(30)
        assert isinstance(lost, WorkerLost)
        assert "exit code 3" in lost.reason
        assert (tmp_path / "logs" / "rollout-0.log").read_text() == "there is no torch\n"


def test_openmp_is_loaded_where_it_is_and_once(tmp_path):
    assert launch.missing_openmp(tmp_path, {}) is None
    library = tmp_path / "lib" / launch.OPENMP
    library.parent.mkdir()
    library.touch()
    assert launch.missing_openmp(tmp_path, {}) == library
    assert launch.missing_openmp(tmp_path, {"LD_PRELOAD": f"a.so:{library}"}) is None


def test_a_python_that_is_not_there_is_refused():
    with pytest.raises(UserError, match=r"rollout\.python = '/no/python': there is no such"):
        check_installed(in_python("/no/python"))
