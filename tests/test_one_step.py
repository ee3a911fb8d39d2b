"""docs/one-step.md names every file that a training step enters; the main path stays short."""

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "one_step.py"


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


def test_a_training_step_enters_no_file_that_the_page_does_not_name(script):
    main_path, beside = script["named"]()
    entered = script["traced"]()
    assert len(entered) > 80, "the whole step is traced, in all processes"
    assert set(main_path) <= set(entered)
    assert set(entered) - {*main_path, *beside} == set()


def test_the_main_path_is_read_in_an_afternoon(script):
    main_path, beside = script["named"]()
    assert not set(main_path) & set(beside)
    assert len(main_path) <= 16
    assert sum(map(script["num_lines"], main_path)) <= 4_885
    assert all((script["PACKAGE"] / path).is_file() for path in beside)
