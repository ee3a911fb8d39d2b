"""Figures of runs that were made before, so that a benchmark that was interrupted goes on.

Holds true: a run's figures are there whole or not at all, with the fields it was made with.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from rhymeflow.errors import UserError

FILE = "figures.json"

T = TypeVar("T")


class Kept(msgspec.Struct, Generic[T], frozen=True):
    """What stays of a run: how it was made, and what it said."""

    overrides: dict[str, str]
    figures: T


def load(run_dir: Path, overrides: Mapping[str, str], kind: type[T]) -> T | None:
    """What a complete run said, `None` if there is none.

    Raises:
        UserError: it was made otherwise.
    """
    path = run_dir / FILE
    if not path.exists():
        return None
    record = msgspec.json.decode(path.read_bytes(), type=Kept[kind])
    if record.overrides != overrides:
        raise UserError(f"{run_dir}: a run of other settings; --runs takes another directory")
    return record.figures


def keep(run_dir: Path, overrides: Mapping[str, str], figures: object) -> None:
    """Keep what a complete run said."""
    fresh = run_dir / f"{FILE}.new"
    fresh.write_bytes(msgspec.json.encode(Kept(dict(overrides), figures)))
    os.replace(fresh, run_dir / FILE)
