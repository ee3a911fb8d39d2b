"""What all tests share."""

import pytest
from hypothesis import settings

# Asserts of helpers say what they compared, as those of test files do.
pytest.register_assert_rewrite("tests.engine", "tests.runtime", "tests.store", "tests.weights")

# How long an example takes depends on what else the machine does.
settings.register_profile("rhymeflow", deadline=None)
settings.load_profile("rhymeflow")
