import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.models.logits import shaped

LOGITS = st.lists(st.integers(-8, 8).map(float), min_size=1, max_size=12)


def _slow(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    x = [v / temperature if temperature else v for v in logits]
    allowed = set(range(len(x)))
    if top_k:
        least = sorted(x, reverse=True)[min(top_k, len(x)) - 1]
        allowed = {i for i in allowed if x[i] >= least}
    if top_p < 1.0:
        order = sorted(allowed, key=lambda i: -x[i])[: top_k or None]
        total = sum(math.exp(x[i]) for i in order)
        mass, kept = 0.0, []
        for i in order:
            if mass >= top_p - 1e-9 and kept:
                break
            kept.append(i)
            mass += math.exp(x[i]) / total
        allowed = {i for i in allowed if x[i] >= min(x[j] for j in kept)}
    return [x[i] if i in allowed else -math.inf for i in range(len(x))]


@given(
    logits=LOGITS,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 50]),
    top_p=st.sampled_from([1.0, 0.93, 0.517, 0.0101]),
)
def test_equals_the_rule_in_words(logits, temperature, top_k, top_p):
    found = shaped(torch.tensor([logits]), temperature=temperature, top_k=top_k, top_p=top_p)
    torch.testing.assert_close(found[0], torch.tensor(_slow(logits, temperature, top_k, top_p)))


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (0, 0.1), (2, 0.1)])
def test_a_token_asked_for_stays(top_k, top_p):
    x = torch.tensor([[5.0, 1.0, 0.0], [0.0, 5.0, 1.0]])
    keep = torch.tensor([2, 1])
    found = shaped(x, temperature=1.0, top_k=top_k, top_p=top_p, keep_R=keep)
    assert found.isfinite().tolist()[0][2]
    assert found.isfinite().tolist()[1] == [False, True, top_k == 2 and top_p == 1.0]


def test_the_input_is_left_alone_and_the_result_is_float32():
    x = torch.randn(2, 5).bfloat16()
    before = x.clone()
    found = shaped(x, temperature=0.7, top_k=2, top_p=0.9, keep_R=torch.tensor([0, 1]))
    assert torch.equal(x, before)
    assert found.dtype == torch.float32
