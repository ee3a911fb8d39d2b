"""docs/one-step.md names every file that a training step enters; the spine stays short."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "one_step.py"


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


def test_a_training_step_enters_no_file_that_the_page_does_not_name(script):
    spine, beside = script["named"]()
    entered = script["traced"]()
    assert len(entered) > 80, "the whole step is traced, in all processes"
    assert set(spine) <= set(entered)
    assert set(entered) - {*spine, *beside} == set()


def test_the_spine_is_read_in_an_afternoon(script):
    spine, beside = script["named"]()
    assert not set(spine) & set(beside)
    assert len(spine) <= 16
    assert sum(map(script["num_lines"], spine)) <= 4_500
    assert all((script["PACKAGE"] / path).is_file() for path in beside)
