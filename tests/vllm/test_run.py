"""Real runs on vLLM: two instances, bound 1, pulls under running requests, one instance killed; and
an engine that sleeps while the learner trains."""

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
PATIENCE = 400  # seconds; on a machine that does nothing else the whole run takes one minute
OPTIONS = f"""
--rollout.engine vllm --rollout.num_instances 2 --rollout.vllm_kv_cache_gb 0.3
--learner.max_steps {STEPS} --schedule.max_staleness 1 --data.eval_size 8 --run.eval_steps {STEPS}
"""


def instances(run: subprocess.Popen[str]) -> list[int]:
    """Process ids of the run's instances."""
    children = map(int, Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split())
    return [i for i in children if b"workers.launch" in Path(f"/proc/{i}/cmdline").read_bytes()]


def test_a_run_with_an_instance_killed_on_the_way(tmp_path):
    run_dir, printed = tmp_path / "run", tmp_path / "output"
    metrics = run_dir / "metrics.jsonl"
    command = [sys.executable, "-m", "rhymeflow", "train", "demo", *OPTIONS.split()]
    command += ["--run.output_dir", str(run_dir)]
    with printed.open("w") as output:
        run = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, text=True)
    try:
        deadline = time.monotonic() + PATIENCE
        while run.poll() is None and time.monotonic() < deadline:
            if metrics.exists() and metrics.read_text().count("\n") >= 3:
                break
            time.sleep(0.2)
        both = instances(run)
        assert len(both) == 2, printed.read_text()
        os.kill(both[0], signal.SIGKILL)
        assert run.wait(timeout=PATIENCE) == 0, printed.read_text()
    finally:
        run.kill()
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == STEPS
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert max(each.get("off_policy/mismatch_kl", 0.0) for each in lines) < 0.05
    audit = [sys.executable, "examples/audit_run.py", str(run_dir)]
    subprocess.run(audit, cwd=ROOT, check=True)
    assert len({path.stem for path in (run_dir / "logs").rglob("rollout-*.log")}) == 3


def test_an_engine_that_sleeps_during_each_step_generates_the_same(tmp_path):
    """A stand-in on a CPU: vLLM stops, begins again with an empty cache, and keeps its memory."""
    rewards = []
    for sleeps in ("false", "true"):
        run_dir = tmp_path / sleeps
        options = f"""--rollout.engine vllm --rollout.vllm_kv_cache_gb 0.3 --learner.max_steps 3
            --data.eval_size 8 --run.eval_steps 3 --schedule.name synchronous
            --rollout.vllm_sleeps {sleeps} --run.output_dir {run_dir}"""
        command = [sys.executable, "-m", "rhymeflow", "train", "demo", *options.split()]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
        assert run.returncode == 0, run.stdout + run.stderr
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        rewards.append([(each.get("reward"), each.get("loss")) for each in lines])
        logs = "".join(path.read_text() for path in (run_dir / "logs").rglob("rollout-*.log"))
        assert ("sleep mode is not supported on CPU" in logs) == (sleeps == "true")
    assert rewards[0] == rewards[1]
