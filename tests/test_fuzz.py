"""Bad input of every kind gets one clear line, or is taken as it was given."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzzing import KINDS, problem


@pytest.mark.parametrize("kind", KINDS)
def test_no_traceback_and_nothing_ignored(kind: str, tmp_path: Path) -> None:
    found = {seed: problem(KINDS[kind], seed, tmp_path) for seed in range(60)}
    assert {seed: what for seed, what in found.items() if what} == {}
