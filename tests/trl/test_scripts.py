"""Scripts in the shape of those that TRL publishes, run as they are but for the import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rhymeflow import recipes

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"


def run(*command: str, cwd: Path, script: str | None = None) -> str:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        input=script,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    """Read from a pipe, too, where there is no file that a process could import."""
    model = str(recipes.directory("demo"))
    out = run(str(SCRIPTS / "one_reward.py"), model, "out", cwd=tmp_path)
    assert out.count("STEPS") == 1
    assert "STEPS 2 3" in out
    assert (tmp_path / "out" / "model.safetensors").is_file()
    text = (SCRIPTS / "one_reward.py").read_text(encoding="utf-8")
    assert "STEPS 2 3" in run("-", model, "out", cwd=tmp_path, script=text)
    assert (tmp_path / "out-2" / "events.db").is_file(), "the second run goes beside the first"


@pytest.mark.slow
def test_several_rewards_and_callbacks(tmp_path: Path) -> None:
    model = str(recipes.directory("demo"))
    script = str(SCRIPTS / "several_rewards.py")
    out = run(script, "--model", model, "--output_dir", "out", cwd=tmp_path)
    assert "EVALUATED" in out
    kept = (tmp_path / "out" / "extra.jsonl").read_text().splitlines()
    assert all('"column":"length"' in line for line in kept)


@pytest.mark.slow
def test_an_environment_and_a_reward_that_is_handed_it(tmp_path: Path) -> None:
    model = str(recipes.directory("tools"))
    out = run(str(SCRIPTS / "agent.py"), model, "out", cwd=tmp_path)
    assert "rewards/reward_total/mean" in out
