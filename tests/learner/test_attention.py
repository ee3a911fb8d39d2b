import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.learner.attention import BLOCK, FlexAttention, PackedAttention, visits
from rhymeflow.learner.cpu_attention import CpuPackedAttention
from rhymeflow.learner.policy import attention_kind
from rhymeflow.models.attention import Reach, Weighing
from tests.learner.builders import learner_config, tiny_model

CPU = torch.device("cpu")


class ByHand:
    """Softmax over the tokens before and at each one, sequence by sequence, head by head."""

    def __init__(self, sequences, num_tokens, device):
        self.sequences = sequences

    def attend(self, layer, q, k, v, how):
        num_heads, num_tokens, _ = q.shape
        share = num_heads // k.shape[0]
        out = torch.zeros(num_tokens, num_heads, v.shape[2], dtype=q.dtype)
        for sequence in self.sequences:
            for i, place in enumerate(sequence):
                seen = torch.as_tensor(sequence[how.reach.first(i) : i + 1])
                for h in range(num_heads):
                    score = (k[h // share, seen] @ q[h, place]) * how.scale
                    if how.cap is not None:
                        score = how.cap * (score / how.cap).tanh()
                    if how.sink_H is not None:
                        score = torch.cat([score, how.sink_H[h : h + 1]])
                    out[place, h] = score.softmax(0)[: len(seen)] @ v[h // share, seen]
        return out


PLAIN = Weighing(0.3)


def made_by(kind, sequences, leaves, probe, num_threads: int = 1, how=PLAIN):
    """Output, and gradients by queries, keys and values [heads, tokens, size], and sinks."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    inputs = leaves
    if how.sink_H is not None:
        sink_H = how.sink_H.detach().to(leaves[0].dtype).to(probe.device).requires_grad_()
        how, inputs = how._replace(sink_H=sink_H), [*leaves, sink_H]
    before, _ = torch.get_num_threads(), torch.set_num_threads(num_threads)
    out = kind(sequences, leaves[0].shape[1], probe.device).attend(0, *leaves, how)
    assert out.dtype == leaves[0].dtype
    grads = torch.autograd.grad((out * probe.to(out.dtype)).sum(), inputs)
    torch.set_num_threads(before)
    return [out.detach(), *grads]


def weighings(heads: int):
    """Ways to weigh tokens, with a reach of few tokens, a cap that bites, sinks that count."""
    reaches = st.one_of(
        st.just(Reach()),
        st.builds(Reach, st.integers(1, 50), st.none()),
        st.builds(Reach, st.none(), st.integers(1, 50)),
    )
    sinks = st.one_of(st.none(), st.just(torch.linspace(-2.0, 3.0, heads)))
    return st.builds(Weighing, st.just(0.3), reaches, st.sampled_from([None, 0.7, 5.0]), sinks)


def numbers(num_tokens: int, size: int, *heads: int, **options):
    """As in a model: [heads, tokens, size] is a view of [tokens, heads, size]. And a probe."""
    torch.manual_seed(num_tokens)
    made = [torch.randn(num_tokens, h, size, **options) for h in (*heads, heads[-1], heads[0])]
    return [x.transpose(0, 1) for x in made[:3]], made[3]


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


@given(tree=trees(), kv_heads=st.sampled_from([1, 2, 4]), how=weighings(4))
@settings(max_examples=40)
def test_equals_attention_by_hand_with_gradients(tree, kv_heads, how):
    sequences, size = tree
    given = numbers(size, 8, 4, kv_heads, dtype=torch.float64)
    kinds = PackedAttention, ByHand
    found, expected = (made_by(kind, sequences, *given, how=how) for kind in kinds)
    torch.testing.assert_close(found, expected)


# -- The compiled kernels --------------------------------------------------------------------------


@given(
    tree=trees(),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3), (9, 3)]),
    size=st.sampled_from([16, 32, 48, 64]),
    num_threads=st.sampled_from([1, 2]),
    data=st.data(),
)
@settings(max_examples=60)
def test_kernels_equal_float64_with_gradients(tree, heads, size, num_threads, data):
    sequences, num_tokens = tree
    leaves, probe = numbers(num_tokens, size, *heads)
    how = data.draw(weighings(heads[0]))
    found = made_by(CpuPackedAttention, sequences, leaves, probe, num_threads, how)
    doubles = [x.double() for x in leaves]
    exact = made_by(PackedAttention, sequences, doubles, probe, num_threads, how)
    torch.testing.assert_close(found, [x.float() for x in exact], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [PackedAttention, CpuPackedAttention, FlexAttention])
def test_values_may_have_another_width_than_keys(kind):
    sequences, how = [np.r_[0:9, 9:30], np.r_[0:9, 30:41]], Weighing(0.3, Reach(12))
    torch.manual_seed(0)
    q, k, v = (torch.randn(heads, 41, size) for heads, size in ((4, 24), (2, 24), (2, 16)))
    found, expected = (each(sequences, 41, CPU).attend(0, q, k, v, how) for each in (kind, ByHand))
    torch.testing.assert_close(found, expected)


def test_kernels_give_the_same_bits_on_any_number_of_threads_and_beside_anything():
    trunk = np.arange(30)
    tree = [np.r_[trunk, 30:90], np.r_[trunk, 90:95], np.r_[trunk, 95:150]]
    leaves, probe = numbers(300, 32, 4, 2)
    few = [x[:, :150] for x in leaves], probe[:150]
    alone = made_by(CpuPackedAttention, tree, *few)
    others = [np.arange(150, 300)]
    for beside in (
        made_by(CpuPackedAttention, tree, *few, 2),
        made_by(CpuPackedAttention, [*others, *tree], leaves, probe, 1),
        made_by(CpuPackedAttention, [*others, *tree], leaves, probe, 3),
    ):
        assert torch.equal(alone[0], beside[0][:150])
        for a, b in zip(alone[1:], beside[1:], strict=True):
            assert torch.equal(a, b[:, :150])


def test_a_tree_is_divided_among_threads_however_long_its_trunk_is():
    trunk = np.arange(100)
    tree = [np.r_[trunk, 100 + 10 * n : 110 + 10 * n] for n in range(40)]
    packed = CpuPackedAttention(tree, 500, CPU)
    assert [len(part) for part in packed._parts] == [3] * 8 + [2] * 8
    assert len(packed._copied) == 15 * 100
    assert len(packed._split(2, 16)) == 16, "of two heads"
    assert len(packed._split(2, 64)) == 32


def test_kernels_in_bfloat16_are_the_float32_ones_rounded():
    sequences = [np.r_[0:10, 10:50], np.r_[0:10, 50:71]]
    leaves, probe = numbers(71, 32, 4, 2, dtype=torch.bfloat16)
    found = made_by(CpuPackedAttention, sequences, leaves, probe)
    exact = made_by(CpuPackedAttention, sequences, [x.float() for x in leaves], probe.float())
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=0.02, atol=0.02)


def test_a_number_that_is_none_stays_in_its_sequence():
    leaves = [torch.ones(h, 80, 16) for h in (2, 1, 1)]
    leaves[0][0, 50] = torch.nan
    out = CpuPackedAttention([np.arange(40), np.arange(40, 80)], 80, CPU).attend(
        0, *leaves, Weighing(1.0)
    )
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


HOWS = [
    PLAIN,
    Weighing(0.3, Reach(window=7)),
    Weighing(0.3, Reach(chunk=5), 2.0, torch.tensor([-1.0, 0.0, 1.0, 2.0])),
]


@pytest.mark.parametrize("how", HOWS, ids=["plain", "window", "chunk, cap, sinks"])
@pytest.mark.parametrize("size", [9, 2 * BLOCK])
def test_flex_equals_the_rectangles(size, how):
    prompt, end = np.arange(3), size - 1
    sequences = [np.r_[prompt, 3 : size // 2], np.r_[prompt, size // 2 : end], np.array([end])]
    leaves, _ = numbers(size, 16, 4, 2)
    found, expected = (
        kind(sequences, size, CPU).attend(0, *leaves, how)
        for kind in (FlexAttention, PackedAttention)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
def test_flex_equals_the_rectangles_with_gradients_on_a_gpu():
    sequences = [np.r_[0:40, 40:300], np.r_[0:40, 300:420], np.r_[420:700]]
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 3e-2)):
        given = numbers(700, 64, 4, 2, device="cuda", dtype=dtype)
        for how in HOWS:
            found, expected = (
                made_by(kind, sequences, *given, how=how)
                for kind in (FlexAttention, PackedAttention)
            )
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", [PackedAttention, CpuPackedAttention, FlexAttention])
def test_tokens_of_no_sequence_and_sequences_that_meet_again_are_defects(kind):
    with pytest.raises(AssertionError, match="no sequence"):
        kind([np.arange(3)], 4, CPU)
    if kind is not PackedAttention:
        with pytest.raises(AssertionError, match="more than their beginnings"):
            kind([np.array([0, 1, 2]), np.array([0, 3, 2])], 4, CPU)
