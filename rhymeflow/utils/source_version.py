"""Which Rhymeflow this is: its version, and the commit where it runs from a clone."""

from __future__ import annotations

from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def source_version() -> str:
    """`0.1.0`, or `0.1.0, commit 74141fc`."""
    from importlib.metadata import version

    commit = _commit(ROOT)
    return version("rhymeflow") + ("" if commit is None else f", commit {commit[:7]}")


def _commit(root: Path) -> str | None:
    """What HEAD is; None: there is no clone, or no git to ask."""
    import subprocess

    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
