"""Which commit a clone is at."""

from __future__ import annotations

import subprocess

import pytest

from rhymeflow.utils import source_version


@pytest.fixture
def clone(tmp_path):
    def git(*arguments: str, at="clone") -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path / at), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "clone").mkdir()
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "one")
    return git


def test_the_commit_of_a_clone_of_a_worktree_and_of_packed_references(clone, tmp_path):
    head = clone("rev-parse", "HEAD")
    clone("worktree", "add", "-q", "../beside")
    for name in ("clone", "beside"):
        assert source_version._commit(tmp_path / name / ".git") == head
    clone("pack-refs", "--all")
    assert source_version._commit(tmp_path / "beside" / ".git") == head
    clone("checkout", "-q", "--detach")
    assert source_version._commit(tmp_path / "clone" / ".git") == head


def test_without_a_clone_there_is_the_version(tmp_path, monkeypatch):
    monkeypatch.setattr(source_version, "ROOT", tmp_path)
    assert source_version.source_version.__wrapped__() == "0.1.0"
