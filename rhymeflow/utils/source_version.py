"""Which Rhymeflow this is: its version, and the commit where it runs from a clone.

Runs no git; a clone whose files were edited has the commit that they were edited from.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def source_version() -> str:
    """`0.1.0`, or `0.1.0, commit 74141fc`."""
    from importlib.metadata import version

    commit = _commit(ROOT / ".git")
    return version("rhymeflow") + ("" if commit is None else f", commit {commit[:7]}")


def _commit(git: Path) -> str | None:
    """What HEAD is; None: there is no clone, or it keeps its references otherwise."""
    if git.is_file():  # a worktree: "gitdir: PATH"
        git = (git.parent / git.read_text().partition(":")[2].strip()).resolve()
    if not (git / "HEAD").is_file():
        return None
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref: "):
        return head
    name = head.removeprefix("ref: ")
    common = git / "commondir"
    home = (git / common.read_text().strip()).resolve() if common.is_file() else git
    if (home / name).is_file():
        return (home / name).read_text().strip()
    packed = home / "packed-refs"
    lines = packed.read_text().splitlines() if packed.is_file() else []
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), None)
