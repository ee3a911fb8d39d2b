"""The version of Rhymeflow, with the commit if it runs from a clone."""

from __future__ import annotations

from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def source_version() -> str:
    """Return `0.1.0`, or `0.1.0, commit 74141fc`."""
    from importlib.metadata import version

    commit = _commit(ROOT)
    return version("rhymeflow") + ("" if commit is None else f", commit {commit[:7]}")


def _commit(root: Path) -> str | None:
    """Return the commit of HEAD, or None without a clone or without git."""
    import subprocess

    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
