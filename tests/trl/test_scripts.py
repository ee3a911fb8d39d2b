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


def run(script: str, recipe: str, cwd: Path, text: str | None = None) -> str:
    """What a script prints, which is given a model and a directory."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, script, str(recipes.directory(recipe)), "out"],
        cwd=cwd,
        input=text,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    """Read from a pipe, too, where there is no file that a process could import."""
    script = SCRIPTS / "one_reward.py"
    out = run(str(script), "demo", tmp_path)
    assert out.count("STEPS") == 1
    assert "STEPS 2 3" in out
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert "STEPS 2 3" in run("-", "demo", tmp_path, script.read_text(encoding="utf-8"))
    assert (tmp_path / "out-2" / "events.db").is_file(), "the second run goes beside the first"


def test_several_rewards_and_callbacks(tmp_path: Path) -> None:
    assert "EVALUATED" in run(str(SCRIPTS / "several_rewards.py"), "demo", tmp_path)
    kept = (tmp_path / "out" / "extra.jsonl").read_text().splitlines()
    assert all('"column":"length"' in line for line in kept)


def test_an_environment_and_a_reward_that_is_handed_it(tmp_path: Path) -> None:
    assert "rewards/reward_total/mean" in run(str(SCRIPTS / "agent.py"), "tools", tmp_path)
