"""The benchmark of the dashboard, on a run so small that it shows nothing but that it works."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from benchmarks import dashboard, harness


def parsed(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    harness.add_common_arguments(parser)
    dashboard.add_arguments(parser)
    return parser.parse_args(given)


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (20, 19), (50, 48), (100, 95)])
def test_percentiles_are_values_that_were_measured(count: int, expected: float) -> None:
    assert dashboard._percentile([float(i) for i in range(count, 0, -1)], 0.95) == expected


@pytest.mark.slow
def test_pages(tmp_path: Path) -> None:
    options = ["--trajectories", "640", "--questions", "2", "--starts", "1"]
    args = parsed(*options, "--run", str(tmp_path / "run"))
    result = dashboard.run(args)
    rows: dict[str, dict[str, Any]] = {row["what"]: row for row in result["rows"]}
    assert rows["run: overview"]["p95, ms"] > 0
    assert len(result["targets"]) == 6
