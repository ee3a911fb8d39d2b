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

pytestmark = pytest.mark.slow


def run(script: str, cwd: Path) -> str:
    """What a script prints, which is given a model and a directory."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script), str(recipes.directory("demo")), "out"],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    assert run("one_reward.py", tmp_path).count("STEPS 2 3") == 1
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_several_rewards_and_callbacks(tmp_path: Path) -> None:
    assert "EVALUATED" in run("several_rewards.py", tmp_path)
    kept = (tmp_path / "out" / "extra.jsonl").read_text().splitlines()
    assert all('"column":"length"' in line for line in kept)
