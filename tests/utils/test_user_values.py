"""What user code may give as rewards of two responses."""

from collections import deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from rhymeflow.utils.user_values import reward_numbers

TAKEN: dict[str, Callable[[], Any]] = {
    "numbers": lambda: [2, True],
    "a tuple": lambda: (2.0, 1.0),
    "in another container": lambda: deque([2, 1]),
    "values of a dictionary": lambda: {"a": 2, "b": 1}.values(),
    "exact numbers": lambda: [Decimal(2), Fraction(3, 3)],
    "scalars": lambda: [np.float32(2), torch.tensor(1.0, dtype=torch.bfloat16)],
    "vectors of one": lambda: [np.array([2.0]), torch.tensor([1.0], requires_grad=True)],
    "an array": lambda: np.array([2, 1], dtype=np.uint8),
    "a tensor": lambda: torch.tensor([2.0, 1.0], requires_grad=True),
    "a column of an array": lambda: np.array([[2.0], [1.0]]),
    "a column of a tensor": lambda: torch.tensor([[2.0], [1.0]]),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("made", TAKEN.values(), ids=TAKEN)
def test_what_is_taken(made):
    assert reward_numbers(made(), 2) == [2.0, 1.0]


def test_data_frames_are_taken_by_position():
    pandas = pytest.importorskip("pandas")
    assert reward_numbers(pandas.Series([2, 1], index=[1, 0]), 2) == [2.0, 1.0]
    assert reward_numbers(pandas.DataFrame({0: [2, 1]}), 2) == [2.0, 1.0]
    with pytest.raises(ValueError, match="returned ndarray"):  # its columns are 0 and 1
        reward_numbers(pandas.DataFrame([[2, 1], [2, 1]]), 2)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a set": (lambda: {2.0, 1.0}, "returned set {1.0, 2.0}, should be a list with 2 numbers"),
    "a dictionary": (lambda: {0: 2.0, 1: 1.0}, "returned dict {"),
    "keys": (lambda: {2: 0, 1: 0}.keys(), "returned dict_keys"),
    "a generator": (lambda: (each for each in (2, 1)), "returned generator"),
    "bytes": (lambda: bytearray(2), "returned bytearray"),
    "text": (lambda: "21", "returned str '21', should be a list"),
    "texts": (lambda: ["2", "1"], "returned str '2' as a reward, should be a number or None"),
    "texts of NumPy": (lambda: np.array(["2", "1"]), "returned str '2' as a reward"),
    "one for all": (lambda: np.array(1.0), "returned ndarray array(1.), should be a list"),
    "a number": (lambda: 1.0, "returned float 1.0, should be a list with 2 numbers"),
    "nothing": (lambda: None, "returned NoneType None, should be a list with 2 numbers"),
    "too few": (list, "returned 0 rewards for 2 responses (with `per: response` each call"),
    "an infinite number": (lambda: [2.0, float("inf")], "returned inf as a reward; None is for"),
    "too large": (lambda: [2, 1e308], "returned 1e+308 as a reward, the largest size is 1e+15"),
    "a row": (lambda: np.array([[2.0, 1.0]]), "returned 1 reward for 2 responses"),
    "a matrix": (lambda: np.zeros((2, 2)), "returned ndarray array([0., 0.]) as a reward"),
    "lists": (lambda: [[2.0], [1.0]], "returned list [2.0] as a reward"),
    "complex numbers": (lambda: np.array([2j, 1j]), "returned complex 2j as a reward"),
    "nothing known": (lambda: torch.zeros(2, device="meta"), "returned Tensor"),
    "a number that is none": (lambda: [2, Decimal("nan")], "returned nan as a reward"),
}


@pytest.mark.parametrize(("made", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(made, said):
    with pytest.raises(ValueError) as error:
        reward_numbers(made(), 2)
    assert said in str(error.value)
