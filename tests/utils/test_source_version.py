"""Which commit a clone is at."""

from __future__ import annotations

import subprocess
from pathlib import Path

from rhymeflow.utils import source_version


def test_the_commit_of_a_clone_and_that_there_is_none(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(source_version, "ROOT", tmp_path)
    found = source_version.source_version.__wrapped__
    assert found() == "0.1.0"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert found() == "0.1.0", "nothing is committed yet"
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    head = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True)
    assert found() == f"0.1.0, commit {head[:7]}"
