"""Which groups teach nothing: rewards that do not differ, as a sum or each by itself."""

import pytest

from rhymeflow.core.spread import is_flat, normalized_sum

ROUNDED = [0.1 + 0.2, 0.3, 0.2 + 0.1]


@pytest.mark.parametrize(
    ("values", "flat"),
    [
        ([], True),
        ([5.0], True),
        (ROUNDED, True),
        ([1e6 * each for each in ROUNDED], True),
        ([1e12 * each for each in ROUNDED], True),
        ([0.0, 1e-9], True),
        ([0.0, 1e-6], False),
        ([1e12, 1e12 + 100], False),
        ([-1.0, 1.0], False),
    ],
)
def test_equal_but_for_rounding(values, flat):
    assert is_flat(values) is flat


FA, FB = [0.1, 0.2, 0.3, 0.15], [0.2, 0.1, 0.0, 0.15]  # their sums are equal but for rounding
ONE, TWO, THREE = [1.0, 0, 0, 0], [0.0, 1, 1, 0], [0.0, 0, 0, 1]  # so are these, exactly
CASES = [
    ((FA, FB), (1.0, 1.0), False),  # and each by itself they cancel out too
    ((FA, FB), (1.0, 0.5), True),
    ((ONE, TWO, THREE), (1.0, 1.0, 1.0), True),
    ((ONE, TWO, THREE), (0.0, 0.0, 0.0), False),
    ((ROUNDED, ROUNDED), (1.0, 1.0), False),
    ((ONE, ONE), (1.0, -1.0), False),
]


@pytest.mark.parametrize(("rewards", "weights", "teaches"), CASES)
def test_each_by_itself(rewards, weights, teaches):
    components = [dict(zip("abc", each, strict=False)) for each in zip(*rewards, strict=True)]
    found = normalized_sum(components, dict(zip("abc", weights, strict=False)))
    assert any(found) is teaches
    assert sum(found) == pytest.approx(0.0, abs=1e-9)


def test_one_that_does_not_apply_is_not_compared():
    found = normalized_sum([{"a": 1.0}, {"a": 3.0}, {}], {"a": 2.0})
    assert found[:2] == [pytest.approx(-(2**0.5), abs=1e-3), pytest.approx(2**0.5, abs=1e-3)]
    assert found[2] == 0.0
    assert normalized_sum([{"a": 1.0}, {}], {"a": 2.0}) == [0.0, 0.0]
