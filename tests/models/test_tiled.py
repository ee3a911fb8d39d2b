"""Products by tiles against torch's, and which weights they are for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.models.tiled import COLUMNS, Tiled


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(0, 4), tiles=st.integers(1, 4), depth=st.integers(1, 70))
def test_same_as_the_plain_product(rows, tiles, depth):
    torch.manual_seed(depth)
    weight_OI, x = torch.randn(tiles * COLUMNS, depth), torch.randn(8 * rows, depth)
    assert Tiled.serves(weight_OI, None)
    expected = (x.double() @ weight_OI.double().T).float()
    torch.testing.assert_close(Tiled(weight_OI)(x), expected, rtol=1e-4, atol=1e-4)


def test_a_row_does_not_depend_on_the_others():
    weight_OI, x = torch.randn(64, 48), torch.randn(24, 48)
    assert torch.equal(Tiled(weight_OI)(x)[8:16], Tiled(weight_OI)(x[8:16].clone()))


@pytest.mark.parametrize(
    ("weight_OI", "bias_O"),
    [
        (torch.zeros(COLUMNS + 1, 8), None),
        (torch.zeros(COLUMNS, 8, dtype=torch.bfloat16), None),
        (torch.zeros(COLUMNS, 8), torch.zeros(COLUMNS)),
        (torch.zeros(1024, 1024), None),
    ],
)
def test_what_it_does_not_serve(weight_OI, bias_O):
    assert not Tiled.serves(weight_OI, bias_O)
