"""A real run whose machine is lost goes on elsewhere from its mirror."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from rhymeflow.observe import metrics
from rhymeflow.utils import shared_memory
from rhymeflow.utils.child import descendants
from tests.runtime.test_resume import audit, learned, small, tokens


@pytest.mark.slow
def test_a_run_whose_directory_is_lost_goes_on_from_its_mirror(tmp_path):
    """Killed with all its processes; the same tokens and losses as a run that was not."""
    values = {
        "schedule": {"name": "synchronous", "max_staleness": 0},
        "learner": {"max_steps": 8},
    }
    runs = {"straight": {}, "lost": {"mirror": str(tmp_path / "mirror"), "mirror_seconds": 0.2}}
    command = [sys.executable, "-m", "rhymeflow"]
    for name, run in runs.items():
        config = small(tmp_path, name, **values, run={**run, "save_steps": 3})
        text = json.dumps(config.model_dump(mode="json"))
        (tmp_path / f"{name}.yaml").write_text(text)
    options = {"cwd": tmp_path, "stdout": subprocess.DEVNULL}
    subprocess.run([*command, "train", "straight.yaml"], **options, check=True, timeout=120)
    process = subprocess.Popen([*command, "train", "lost.yaml"], **options)
    deadline = time.monotonic() + 120
    while max(metrics.read(tmp_path / "lost"), default=0) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for pid in (process.pid, *descendants(process.pid)):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    shared_memory.free_left(shared_memory.prefix_for(tmp_path / "lost", ""))
    shutil.rmtree(tmp_path / "lost")
    done = subprocess.run(
        [*command, "resume", str(tmp_path / "mirror"), "--output_dir", "found"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"{tmp_path}/mirror: the log until event ")
    assert "left out" not in done.stderr
    summary = json.loads((tmp_path / "found" / "summary.json").read_text())
    assert (summary["steps"], summary["mirror"]["events_behind"]) == (8, 0)
    audit(tmp_path / "found")
    assert learned(tmp_path / "found") == learned(tmp_path / "straight")
    assert tokens(tmp_path / "found") == tokens(tmp_path / "straight")
