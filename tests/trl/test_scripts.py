"""Scripts in the shape of those that TRL publishes, run as they are but for the import."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rhymeflow import recipes

SCRIPTS = Path(__file__).parent / "scripts"
DEMO = recipes.directory("demo")

pytestmark = pytest.mark.slow


def test_a_script_without_a_guard_runs_once(run_script: Callable[..., str], tmp_path: Path) -> None:
    printed = run_script(SCRIPTS / "one_reward.py", DEMO, "out")
    assert printed.count("STEPS 2 3") == 1
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_several_rewards_and_callbacks(run_script: Callable[..., str], tmp_path: Path) -> None:
    assert "EVALUATED" in run_script(SCRIPTS / "several_rewards.py", DEMO, "out")
    kept = (tmp_path / "out" / "extra.jsonl").read_text().splitlines()
    assert all('"column":"length"' in line for line in kept)
