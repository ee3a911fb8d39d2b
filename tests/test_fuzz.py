"""Bad input of every kind gets one clear line, or is taken as it was given."""

import pytest

from tests.fuzzing import KINDS, problem

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", KINDS)
def test_no_traceback_and_nothing_ignored(kind, tmp_path):
    found = {seed: problem(KINDS[kind], seed, tmp_path) for seed in range(300)}
    assert {seed: what for seed, what in found.items() if what} == {}
