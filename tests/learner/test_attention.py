import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.learner.attention import BLOCK, FlexAttention, PackedAttention, visits
from rhymeflow.learner.cpu_attention import CpuPackedAttention
from rhymeflow.learner.policy import attention_kind
from tests.learner.builders import learner_config, tiny_model

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
    """Sequences over one row: some alone, some with beginnings of others, or all of them."""
    sequences, size = [], 0
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 45))
        tree = [np.arange(size, size + length)]
        size += length
        for _ in range(draw(st.integers(0, 3))):
            begun, length = draw(st.sampled_from(tree)), draw(st.integers(0, 40))
            begun = begun[: draw(st.integers(1, len(begun)))]
            tree.append(np.concatenate([begun, np.arange(size, size + length)]))
            size += length
        sequences += tree
    return sequences, size


@given(tree=trees(), kv_heads=st.sampled_from([1, 2, 4]))
@settings(max_examples=25)
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


# -- The compiled kernels --------------------------------------------------------------------------


@given(
    tree=trees(),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3), (9, 3)]),
    size=st.sampled_from([16, 32, 48, 64]),
    num_threads=st.sampled_from([1, 2]),
)
@settings(max_examples=40)
def test_kernels_equal_float64_with_gradients(tree, heads, size: int, num_threads: int):
    sequences, num_tokens = tree
    torch.manual_seed(num_tokens)
    q, k, v = (torch.randn(num_tokens, h, size).transpose(0, 1) for h in (*heads, heads[1]))
    probe = torch.randn(num_tokens, heads[0], size)
    results = []
    before, _ = torch.get_num_threads(), torch.set_num_threads(num_threads)
    for kind, dtype in ((CpuPackedAttention, torch.float32), (PackedAttention, torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = kind(sequences, num_tokens, CPU).attend(0, *leaves, 0.3)
        grads = torch.autograd.grad((out * probe).sum(), leaves)
        results.append([x.float() for x in (out, *grads)])
    torch.set_num_threads(before)
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def kernels_on(sequences, num_tokens: int, num_threads: int = 1, seed: int = 0):
    """Output and gradients, of values that depend on a token's place alone."""
    torch.manual_seed(seed)
    leaves = [torch.randn(300, h, 32)[:num_tokens].transpose(0, 1) for h in (4, 2, 2)]
    leaves = [x.clone().requires_grad_() for x in leaves]
    probe = torch.randn(300, 4, 32)[:num_tokens]
    before, _ = torch.get_num_threads(), torch.set_num_threads(num_threads)
    out = CpuPackedAttention(sequences, num_tokens, CPU).attend(0, *leaves, 0.3)
    grads = torch.autograd.grad((out * probe).sum(), leaves)
    torch.set_num_threads(before)
    return [out.detach().transpose(0, 1), *grads]


def test_kernels_give_the_same_bits_on_any_number_of_threads_and_beside_anything():
    trunk = np.arange(30)
    tree = [np.r_[trunk, 30:90], np.r_[trunk, 90:95], np.r_[trunk, 95:150]]
    alone = kernels_on(tree, 150)
    for others, num_threads in (([], 2), ([np.arange(150, 300)], 1), ([np.arange(150, 300)], 3)):
        end = 300 if others else 150
        beside = kernels_on([*others, *tree], end, num_threads)
        for a, b in zip(alone, beside, strict=True):
            assert torch.equal(a, b[:, :150])


def test_kernels_in_bfloat16_are_the_float32_ones_rounded():
    torch.manual_seed(0)
    sequences = [np.r_[0:10, 10:50], np.r_[0:10, 50:71]]
    leaves = [torch.randn(h, 71, 32).bfloat16() for h in (4, 2, 2)]
    probe, results = torch.randn(71, 4, 32).bfloat16(), []
    for dtype in (torch.bfloat16, torch.float32):
        given = [x.to(dtype).requires_grad_() for x in leaves]
        out = CpuPackedAttention(sequences, 71, CPU).attend(0, *given, 0.3)
        assert out.dtype == dtype
        results.append([out, *torch.autograd.grad((out * probe.to(dtype)).sum(), given)])
    for found, exact in zip(*results, strict=True):
        torch.testing.assert_close(found.float(), exact, rtol=0.02, atol=0.02)


def test_a_number_that_is_none_stays_in_its_sequence():
    leaves = [torch.ones(h, 80, 16) for h in (2, 1, 1)]
    leaves[0][0, 50] = torch.nan
    out = CpuPackedAttention([np.arange(40), np.arange(40, 80)], 80, CPU).attend(0, *leaves, 1.0)
    assert out[50, 0].isnan().all()
    assert int(out.isnan().sum()) == 16


@pytest.mark.parametrize(
    ("attention", "head_dim", "dtype", "kind"),
    [
        ("auto", 16, torch.float32, CpuPackedAttention),
        ("auto", 16, torch.bfloat16, CpuPackedAttention),
        ("auto", 8, torch.float32, PackedAttention),
        ("auto", 16, torch.float64, PackedAttention),
        ("sdpa", 16, torch.float32, PackedAttention),
    ],
)
def test_auto_takes_the_kernels_where_they_serve(attention, head_dim, dtype, kind):
    model = tiny_model().to(dtype)
    model.config.head_dim = head_dim
    assert attention_kind(learner_config(attention=attention), model) is kind


# -- FlexAttention ---------------------------------------------------------------------------------


@given(tree=trees())
def test_a_token_sees_its_sequence_up_to_itself(tree):
    """The mask's rule, against the sequences themselves."""
    sequences, size = tree
    enter, leave = visits(sequences, size)
    seen = (enter <= enter[:, None]) & (enter[:, None] < leave)
    expected = np.zeros((size, size), dtype=bool)
    for places in sequences:
        expected[np.ix_(places, places)] |= np.tri(len(places), dtype=bool)
    np.testing.assert_array_equal(seen, expected)


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


@pytest.mark.parametrize("kind", [PackedAttention, CpuPackedAttention, FlexAttention])
def test_tokens_of_no_sequence_and_sequences_that_meet_again_are_defects(kind):
    with pytest.raises(AssertionError, match="no sequence"):
        kind([np.arange(3)], 4, CPU)
    if kind is not PackedAttention:
        with pytest.raises(AssertionError, match="more than their beginnings"):
            kind([np.array([0, 1, 2]), np.array([0, 3, 2])], 4, CPU)
