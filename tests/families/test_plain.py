"""Types whose layers attend, without a state: engine, learner and transformers compute the same."""

import pytest

from tests.families.cases import DENSE, EXPERTS, WINDOWS, eager, save
from tests.families.checks import check_engine, check_learner, load


@pytest.mark.parametrize("name", [*DENSE, *WINDOWS, *EXPERTS])
def test_engine_and_learner_compute_the_model(name, tmp_path):
    save(name, tmp_path)
    model, plain = load(tmp_path), eager(tmp_path)
    check_engine(model, plain)
    check_learner(model, plain)
