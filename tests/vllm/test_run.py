"""A real run on vLLM: two instances, bound 1, pulls under running requests, one instance killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.vllm.sameness import needs_vllm

pytestmark = [needs_vllm, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
STEPS = 4
PATIENCE = 400
"""Seconds; on a machine that does nothing else the whole run takes one minute."""


def instances(run: subprocess.Popen[str]) -> list[int]:
    """Process ids of the run's instances."""
    children = map(int, Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split())
    return [i for i in children if b"workers.launch" in Path(f"/proc/{i}/cmdline").read_bytes()]


def steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_run_with_an_instance_killed_on_the_way(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = {
        "rollout.engine": "vllm",
        "rollout.num_instances": "2",
        "rollout.vllm_kv_cache_gb": "0.3",
        "learner.max_steps": str(STEPS),
        "schedule.max_staleness": "1",
        "data.eval_size": "8",
        "run.eval_steps": str(STEPS),
        "run.output_dir": str(run_dir),
    }
    given = [part for name, value in options.items() for part in (f"--{name}", value)]
    command = [sys.executable, "-m", "rhymeflow", "train", "demo", *given]
    with (tmp_path / "output").open("w") as output:
        run = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, text=True)
    try:
        watch(run, run_dir, tmp_path / "output")
    finally:
        run.kill()


def watch(run: subprocess.Popen[str], run_dir: Path, printed: Path) -> None:
    """Kill an instance after two steps, and look at what the run comes to."""
    deadline = time.monotonic() + PATIENCE
    while steps(run_dir) < 3 and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    both = instances(run)
    assert len(both) == 2, printed.read_text()
    os.kill(both[0], signal.SIGKILL)
    assert run.wait(timeout=PATIENCE) == 0, printed.read_text()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == STEPS
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert max(each.get("off_policy/mismatch_kl", 0.0) for each in metrics) < 0.05
    audit = subprocess.run(
        [sys.executable, "examples/audit_run.py", str(run_dir)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert audit.returncode == 0, audit.stdout + audit.stderr
    logs = {path.stem for path in (run_dir / "logs").rglob("rollout-*.log")}
    assert len(logs) == 3, logs
