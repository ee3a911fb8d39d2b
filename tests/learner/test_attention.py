import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.learner.attention import PackedAttention
from rhymeflow.learner.flex_attention import BLOCK, FlexAttention, parts

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


# -- FlexAttention ---------------------------------------------------------------------------------


@given(tree=trees())
def test_a_token_sees_its_sequence_up_to_itself(tree):
    """The mask's rule, against the sequences themselves."""
    sequences, size = tree
    part, trunk = parts(sequences, size)
    earlier = np.tri(size, dtype=bool)
    seen = earlier & ((part == part[:, None]) | (part == trunk[:, None]))
    expected = np.zeros((size, size), dtype=bool)
    for places in sequences:
        expected[np.ix_(places, places)] |= np.tri(len(places), dtype=bool)
    np.testing.assert_array_equal(seen, expected)


def test_a_sequence_of_more_than_a_trunk_and_a_branch_is_noticed():
    branching_twice = [np.array([0, 1, 2]), np.array([0, 1, 3, 4]), np.array([0, 1, 3, 5])]
    with pytest.raises(AssertionError, match="more than a trunk"):
        parts(branching_twice, 6)


@pytest.mark.parametrize("size", [9, 2 * BLOCK])
def test_flex_equals_the_rectangles(size: int):
    torch.manual_seed(0)
    prompt, end = np.arange(3), size - 1
    sequences = [np.r_[prompt, 3 : size // 2], np.r_[prompt, size // 2 : end], np.array([end])]
    sequences = [places for places in sequences if len(places)]
    q, k, v = (torch.randn(heads, size, 16) for heads in (4, 2, 2))
    expected = PackedAttention(sequences, size, CPU).attend(0, q, k, v, 0.3)
    torch.testing.assert_close(
        FlexAttention(sequences, size, CPU).attend(0, q, k, v, 0.3), expected
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_flex_equals_the_rectangles_with_gradients_on_a_gpu():
    torch.manual_seed(0)
    device, size = torch.device("cuda"), 700
    sequences = [np.r_[0:40, 40:300], np.r_[0:40, 300:420], np.r_[420:size]]
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 3e-2)):
        q, k, v = (
            torch.randn(size, heads, 64, device=device, dtype=dtype).transpose(0, 1)
            for heads in (8, 2, 2)
        )
        probe = torch.randn(size, 8, 64, device=device, dtype=dtype)
        results = []
        for kind in (PackedAttention, FlexAttention):
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = kind(sequences, size, device).attend(0, *leaves, 0.125)
            results.append([out, *torch.autograd.grad((out * probe).sum(), leaves)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_flex_keeps_sequences_apart_on_a_gpu():
    """Packed isolation: what one sequence holds changes no bit of another's."""
    torch.manual_seed(0)
    device, size = torch.device("cuda"), 500
    sequences = [np.r_[0:200], np.r_[200:size]]
    q, k, v = (torch.randn(4, size, 64, device=device) for _ in range(3))
    before = FlexAttention(sequences, size, device).attend(0, q, k, v, 0.125)[:200]
    for x in (q, k, v):
        x[:, 200:] = torch.randn_like(x[:, 200:])
    after = FlexAttention(sequences, size, device).attend(0, q, k, v, 0.125)[:200]
    assert torch.equal(before, after)
