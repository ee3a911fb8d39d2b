import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.learner.attention import PackedAttention

CPU = torch.device("cpu")


def _by_hand(q, k, v, sequences, scale):
    """Softmax over the tokens before and at each one, sequence by sequence, head by head."""
    num_heads, num_tokens, size = q.shape
    share = num_heads // k.shape[0]
    out = torch.zeros(num_tokens, num_heads, size, dtype=q.dtype)
    for sequence in sequences:
        for i, place in enumerate(sequence):
            seen = torch.as_tensor(sequence[: i + 1])
            for h in range(num_heads):
                score = (k[h // share, seen] @ q[h, place]) * scale
                out[place, h] = score.softmax(0) @ v[h // share, seen]
    return out


@st.composite
def trees(draw) -> tuple[list[np.ndarray], int]:
    """Sequences over one row: some alone, some sharing a prompt."""
    sequences, size = [], 0
    for _ in range(draw(st.integers(1, 4))):
        prompt = draw(st.integers(1, 5))
        trunk = np.arange(size, size + prompt)
        size += prompt
        for _ in range(draw(st.integers(1, 3))):
            length = draw(st.integers(0, 40))
            sequences.append(np.concatenate([trunk, np.arange(size, size + length)]))
            size += length
    return sequences, size


@given(tree=trees(), kv_heads=st.sampled_from([1, 2, 4]))
@settings(max_examples=25, deadline=None)
def test_equals_attention_by_hand_with_gradients(tree, kv_heads: int):
    sequences, size = tree
    torch.manual_seed(0)
    # As in a model: [heads, tokens, size] is a view of [tokens, heads, size].
    q, k, v = (
        torch.randn(size, heads, 8, dtype=torch.float64).transpose(0, 1).requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    )
    expected = _by_hand(q, k, v, sequences, 0.3)
    found = PackedAttention(sequences, size, CPU).attend(0, q, k, v, 0.3)
    torch.testing.assert_close(found, expected)
    probe = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad((found * probe).sum(), (q, k, v)),
        torch.autograd.grad((expected * probe).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_a_token_in_no_sequence_is_a_defect():
    with pytest.raises(AssertionError, match="no sequence"):
        PackedAttention([np.arange(3)], 4, CPU)
