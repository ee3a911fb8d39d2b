"""Both attentions against the formula in float64: ragged spans, trees, size classes, threads."""

import contextlib
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rhymeflow.engine.native import cpu_attention
from rhymeflow.engine.native.attention import attention_for
from rhymeflow.engine.native.cache import CacheSpan, KVCache
from rhymeflow.engine.native.cpu_attention import DTYPES, CpuAttention, serves
from rhymeflow.models.attention import Reach, Shape, Weighing

SIZES = HEADS, KV_HEADS, DIM = 6, 2, 16
TOLERANCE = {torch.float32: 6e-6, torch.bfloat16: 3e-2, torch.float64: 1e-12}
"""float64 is the one that the kernel does not serve."""
CPU = torch.device("cpu")

Case = tuple[int, int, list[int] | None]
MIXED: list[Case] = [
    (0, 1, None),
    (5, 1, None),
    (40, 9, None),
    (0, 70, None),  # a prompt, in several blocks of rows
    (300, 3, None),  # on a larger size class
    (17, 6, [-1, 0, 0, 1, 3]),
    (2, 12, [-1, -1, 0, 1, 1]),  # a tree behind tokens of a prompt
    (255, 1, None),
    (250, 40, None),
    (60, 45, [7 * i % (i + 1) - 1 for i in range(44)]),
]


class Filled:
    """A cache with something in it, and a packed row of new tokens."""

    def __init__(self, cases, dtype, seed=0, sizes=SIZES, how=None):
        torch.manual_seed(seed)
        heads, kv_heads, dim = sizes
        self.group, self.how = heads // kv_heads, how or Weighing(dim**-0.5)
        self.cache = KVCache(Shape(2, kv_heads, dim), dtype, CPU)
        self.spans = [
            CacheSpan(self.cache.reserve(None, cached, new), cached, new, parents)
            for cached, new, parents in cases
        ]
        for size_class in self.cache.size_classes.values():
            # Beyond what is cached there is rubbish, and none of it may be seen.
            size_class.kv.fill_(torch.nan if dtype in DTYPES else 50.0)
        for span in self.spans:
            kv = span.slot.size_class.kv[:, :, span.slot.index, :, : span.cached]
            kv.copy_(torch.randn(kv.shape))
        tokens = sum(span.num_new for span in self.spans)
        self.q = torch.randn(tokens, heads, dim).to(dtype)
        self.k = torch.randn(tokens, kv_heads, dim).to(dtype)
        self.v = torch.randn(tokens, kv_heads, dim).to(dtype)

    def attend(self, attention, layer=1, unused=3):
        """What comes of each span; its keys and values are in the cache then."""
        sizes = [span.num_new for span in self.spans]
        rows = [
            torch.cat([x, x[:1].repeat(unused, 1, 1)]).transpose(0, 1)
            for x in (self.q, self.k, self.v)
        ]
        out = attention(self.spans).attend(layer, *rows, self.how)
        assert out.dtype == self.q.dtype
        assert not out[sum(sizes) :].any()
        for span, *new in zip(self.spans, self.k.split(sizes), self.v.split(sizes), strict=True):
            held = span.slot.size_class.kv[layer, :, span.slot.index]
            held = held[:, :, span.cached : span.cached + span.num_new]
            assert torch.equal(held, torch.stack(new).transpose(1, 2))
        return out[: sum(sizes)].split(sizes)

    def by_formula(self, layer=1):
        start = 0
        for span in self.spans:
            part = slice(start, start + span.num_new)
            start = part.stop
            held = span.slot.size_class.kv[layer, :, span.slot.index, :, : span.cached].double()
            keys, values = (
                torch.cat([old, new[part].double().transpose(0, 1)], 1).repeat_interleave(
                    self.group, 0
                )
                for old, new in zip(held, (self.k, self.v), strict=True)
            )
            length = span.cached + span.num_new
            places = [range(row + 1) for row in range(span.cached, length)]
            for node in range(len(span.parents or ())):
                root = length - len(span.parents)
                path = line_to(span.parents, node, root)
                places[node - len(span.parents)] = [*range(root), *path]
            seen = torch.zeros(span.num_new, length, dtype=torch.bool)
            for row, path in zip(seen, places, strict=True):  # its positions are 0, 1, 2, ...
                row[path[self.how.reach.first(len(path) - 1) :]] = True
            scores = self.q[part].double().transpose(0, 1) @ keys.transpose(1, 2) * self.how.scale
            if self.how.cap is not None:
                scores = self.how.cap * (scores / self.how.cap).tanh()
            scores = scores.masked_fill(~seen, -torch.inf)
            if self.how.sink_H is not None:
                sink = self.how.sink_H.double()[:, None, None].expand(-1, span.num_new, 1)
                scores = torch.cat([scores, sink], -1)
            yield (scores.softmax(-1)[..., :length] @ values).transpose(0, 1)


@contextlib.contextmanager
def threads(count):
    """Also for what is too small to be worth it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    with patch.object(cpu_attention, "_PAIRS_PER_THREAD", 1):
        yield
    torch.set_num_threads(before)


@st.composite
def cases(draw):
    """A span: what is cached, how many are new, and perhaps a tree at its end."""
    cached, new = draw(st.integers(0, 400)), draw(st.integers(1, 12))
    size = draw(st.integers(0, new if cached else new - 1))
    return cached, new, [draw(st.integers(-1, i - 1)) for i in range(size)] or None


MIXED_SIZES = {"cases": MIXED, "group": 3, "kv_heads": 2, "dim": 16}
REACHES = st.one_of(
    st.just(Reach()),
    st.builds(Reach, st.integers(1, 300), st.none()),
    st.builds(Reach, st.none(), st.integers(1, 300)),
)


@pytest.mark.parametrize("dtype", TOLERANCE)
@given(
    cases=st.lists(cases(), min_size=1, max_size=6),
    group=st.sampled_from([1, 2, 3, 4, 8]),
    kv_heads=st.integers(1, 3),
    dim=st.sampled_from([8, 16, 24, 32, 40, 56, 64, 80, 128]),
    count=st.sampled_from([1, 2]),
    reach=REACHES,
    cap=st.sampled_from([None, 1.5]),
    has_sink=st.booleans(),
)
@example(**MIXED_SIZES, count=1, reach=Reach(), cap=None, has_sink=False)
@example(**MIXED_SIZES, count=2, reach=Reach(), cap=None, has_sink=False)
@example(**MIXED_SIZES, count=1, reach=Reach(window=5), cap=1.5, has_sink=True)
@example(**MIXED_SIZES, count=2, reach=Reach(chunk=7), cap=None, has_sink=True)
@settings(max_examples=100)
def test_any_sizes_are_the_formula(dtype, cases, group, kv_heads, dim, count, reach, cap, has_sink):
    """Few rows and many, whole panels of keys and parts, all head sizes, groups and weighings."""
    heads = group * kv_heads
    sink_H = torch.linspace(-2.0, 3.0, heads) if has_sink else None
    how = Weighing(dim**-0.5, reach, cap, sink_H)
    filled = Filled(cases, dtype, sizes=(heads, kv_heads, dim), how=how)
    with threads(count):
        found = filled.attend(attention_for(CPU, dtype, dim))
    for got, right in zip(found, filled.by_formula(), strict=True):
        assert (got.double() - right).abs().max().item() < TOLERANCE[dtype]


def test_company_changes_no_bit():
    """Law 3 where it can be had to the last bit: among others, in other threads and order."""
    attention = CpuAttention(torch.float32, DIM)
    filled = Filled(MIXED, torch.float32)
    together = filled.attend(attention.over)
    sizes, order = [span.num_new for span in filled.spans], list(range(len(MIXED)))[::-1]
    for x in ("q", "k", "v"):
        parts = getattr(filled, x).split(sizes)
        setattr(filled, x, torch.cat([parts[i] for i in order]))
    filled.spans = [filled.spans[i] for i in order]
    with threads(2):
        for i, found in zip(order, filled.attend(attention.over), strict=True):
            assert torch.equal(together[i], found)


def test_what_it_serves():
    assert serves(CPU, torch.float32, 32)
    assert not serves(CPU, torch.float64, 32)
    assert not serves(CPU, torch.float32, 36)
    assert not serves(torch.device("cuda"), torch.float32, 32)
    assert attention_for(CPU, torch.float64, 32)


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    case=cases(),
    group=st.sampled_from([1, 2, 3, 8]),
    dim=st.sampled_from([8, 16, 24, 32, 40, 64]),
    seed=st.integers(0, 99),
    reach=REACHES,
    has_more=st.booleans(),
)
@settings(max_examples=60)
def test_a_row_of_a_draft_is_that_of_the_last_token_alone_to_the_last_bit(
    dtype, case, group, dim, seed, reach, has_more
):
    """Whatever stands beside it in a tree, and where in the cache its ancestors lie."""
    cached, new, parents = case
    more = (1.5, torch.linspace(-2.0, 3.0, group)) if has_more else ()
    how = Weighing(dim**-0.5, reach, *more)
    filled = Filled([case], dtype, seed, sizes=(group, 1, dim), how=how)
    (span,), attention = filled.spans, CpuAttention(dtype, dim)
    (found,) = filled.attend(attention.over)
    before = list(range(new - len(parents or [])))
    for row in range(new):
        node = row - len(before)
        path = before[: row + 1] if node < 0 else [*before, *line_to(parents, node, len(before))]
        before_it = cached + len(path) - 1
        alone = CacheSpan(filled.cache.reserve(None, before_it, 1), before_it, 1)
        kv = alone.slot.size_class.kv[1, :, alone.slot.index]
        kv[:, :, :cached] = span.slot.size_class.kv[1, :, span.slot.index, :, :cached]
        held = torch.stack([filled.k[path[:-1]], filled.v[path[:-1]]]).transpose(1, 2)
        kv[:, :, cached : cached + len(path) - 1] = held
        last = [x[row : row + 1].transpose(0, 1) for x in (filled.q, filled.k, filled.v)]
        assert torch.equal(attention.over([alone]).attend(1, *last, filled.how)[0], found[row])


def line_to(parents, node, first):
    """Rows of a node's ancestors and its own; the tree's first node is row `first`."""
    path = []
    while node >= 0:
        path.append(first + node)
        node = parents[node]
    return path[::-1]
