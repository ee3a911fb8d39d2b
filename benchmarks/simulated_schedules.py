"""The schedules side by side in simulated clusters: `rhymeflow bench schedules --simulated`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.charts import Bar
from rhymeflow.errors import UserError

RECORD = "schedules-simulated"
"""Name of the record."""


def add_arguments(parser: Any) -> None:
    """Add options of this side alone; those of `benchmarks.schedules` are there."""


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Simulate and report."""
    raise UserError("bench schedules: --simulated is not there yet")


def bars(rows: Sequence[dict[str, Any]]) -> list[Bar]:
    """What `charts.side_by_side` shows of a record's rows."""
    return []
