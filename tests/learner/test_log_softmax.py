"""Scores and gradient against the formulas in float64."""

import numpy as np
import pytest
import torch

from rhymeflow.learner.logprobs import into_gradient, scores


def rows(count: int, size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x_CV = torch.randn(count, size, generator=generator) * 6
    return x_CV, torch.randint(size, (count,), generator=generator)


@pytest.mark.parametrize(("count", "size"), [(1, 5), (70, 33), (3, 200_000)])  # the last in parts
def test_equals_the_formulas(count: int, size: int):
    x_CV, targets_C = rows(count, size)
    x_CV[:, 1:3] = -torch.inf  # left out by top-k
    targets_C[:] = torch.where((targets_C == 1) | (targets_C == 2), 0, targets_C)
    exact_CV = x_CV.double().log_softmax(1)
    p_CV = exact_CV.exp()
    logprob_C, entropy_C, log_sum_C = scores(x_CV, targets_C)
    grad_C = torch.linspace(-1, 2, count)
    found_CV = into_gradient(x_CV.clone(), log_sum_C, targets_C, grad_C)
    near = {"rtol": 1e-6, "atol": 4e-6}
    expected = exact_CV.gather(1, targets_C[:, None])[:, 0].float()
    torch.testing.assert_close(logprob_C, expected, **near)
    entropy = -(p_CV * exact_CV.masked_fill(p_CV == 0, 0)).sum(1).float()
    torch.testing.assert_close(entropy_C, entropy, rtol=2e-5, atol=4e-6)
    onehot_CV = torch.nn.functional.one_hot(targets_C, size)
    gradient = ((onehot_CV - p_CV) * grad_C[:, None]).float()
    torch.testing.assert_close(found_CV, gradient, **near)


def test_the_largest_may_stand_anywhere():
    for place in range(70):
        x_CV = torch.zeros(1, 70)
        x_CV[0, place] = 300.0  # exp of it is infinite
        logprob_C, entropy_C, log_sum_C = scores(x_CV, torch.tensor([place]))
        assert (logprob_C, entropy_C, log_sum_C) == (0.0, 0.0, 300.0)


def test_what_is_no_number_is_seen():
    x_CV, targets_C = rows(3, 100)
    x_CV[1, 40] = torch.nan
    for found in scores(x_CV, (targets_C % 40)):
        np.testing.assert_array_equal(found.isnan(), [False, True, False])
