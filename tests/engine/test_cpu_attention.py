"""The compiled attention against the formula in float64: ragged spans, trees, size classes,
threads."""

import random

import pytest
import torch

from rhymeflow.engine.native import cpu_attention
from rhymeflow.engine.native.attention import ancestors_of, attention_for
from rhymeflow.engine.native.cache import KVCache
from rhymeflow.engine.native.cpu_attention import CpuAttention
from rhymeflow.engine.native.packing import Span

HEADS, KV_HEADS, DIM, SCALE = 6, 2, 16, 0.3
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
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
]


class Filled:
    """A cache with something in it, and a packed row of new tokens."""

    def __init__(self, cases, dtype, seed=0):
        torch.manual_seed(seed)
        self.cache = KVCache(
            num_layers=2, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype, device=CPU
        )
        self.spans = [
            Span(self.cache.reserve(None, cached + new), cached, new, parents)
            for cached, new, parents in cases
        ]
        for size_class in self.cache.size_classes.values():
            # Beyond what is cached there is rubbish, and none of it may be seen.
            size_class.kv.fill_(torch.nan)
        for span in self.spans:
            kv = span.slot.size_class.kv[:, :, span.slot.index, :, : span.cached]
            kv.copy_(torch.randn(kv.shape))
        tokens = sum(span.num_new for span in self.spans)
        self.q = torch.randn(tokens, HEADS, DIM).to(dtype)
        self.k = torch.randn(tokens, KV_HEADS, DIM).to(dtype)
        self.v = torch.randn(tokens, KV_HEADS, DIM).to(dtype)

    def attend(self, attention, layer=1, unused=3):
        generated = attention(self.spans)
        rows = [slice(None)] * len(self.spans)
        start = 0
        for i in generated.order:
            rows[i] = slice(start, start + self.spans[i].num_new)
            start = rows[i].stop
        assert list(generated.order) == list(range(len(self.spans)))
        more = [torch.cat([x, x[:1].repeat(unused, 1, 1)]) for x in (self.q, self.k, self.v)]
        out = generated.attend(layer, *(x.transpose(0, 1) for x in more), SCALE)
        assert out.dtype == self.q.dtype
        assert not out[start:].any()
        return [out[part] for part in rows]

    def by_formula(self, layer=1):
        start = 0
        for span in self.spans:
            part = slice(start, start + span.num_new)
            start = part.stop
            held = span.slot.size_class.kv[layer, :, span.slot.index, :, : span.cached].double()
            keys, values = (
                torch.cat([old, new[part].double().transpose(0, 1)], 1).repeat_interleave(
                    HEADS // KV_HEADS, 0
                )
                for old, new in zip(held, (self.k, self.v), strict=True)
            )
            own = torch.arange(span.cached, span.cached + span.num_new)
            seen = torch.arange(span.cached + span.num_new) <= own[:, None]
            if span.parents:
                size = len(span.parents)
                for node, bits in enumerate(ancestors_of(span.parents)):
                    for other in range(size):
                        seen[node - size, other - size] = bool(bits >> other & 1)
            scores = self.q[part].double().transpose(0, 1) @ keys.transpose(1, 2) * SCALE
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            yield (weights @ values).transpose(0, 1)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", cpu_attention.DTYPES)
@pytest.mark.parametrize("count", [1, 2])
def test_it_is_the_formula(dtype, count, threads, monkeypatch):
    threads(count)
    monkeypatch.setattr(cpu_attention, "_SMALL", 1)
    filled = Filled(MIXED, dtype)
    expected = list(filled.by_formula())
    found = filled.attend(CpuAttention(dtype, DIM).over)
    for case, got, right in zip(MIXED, found, expected, strict=True):
        error = (got.double() - right).abs().max().item()
        assert error < TOLERANCE[dtype], f"{case}: {error}"


@pytest.mark.parametrize("dtype", cpu_attention.DTYPES)
def test_new_keys_and_values_are_in_the_cache(dtype):
    filled = Filled(MIXED, dtype)
    filled.attend(CpuAttention(dtype, DIM).over)
    start = 0
    for span in filled.spans:
        held = span.slot.size_class.kv[1, :, span.slot.index, :, span.cached :][
            :, :, : span.num_new
        ]
        for got, row in zip(held, (filled.k, filled.v), strict=True):
            assert torch.equal(got.transpose(0, 1), row[start : start + span.num_new])
        start += span.num_new


def test_company_changes_no_bit(threads, monkeypatch):
    """Law 3 where it can be had to the last bit: alone, among others, in other threads."""
    monkeypatch.setattr(cpu_attention, "_SMALL", 1)
    attention = CpuAttention(torch.float32, DIM)
    together = Filled(MIXED, torch.float32).attend(attention.over)
    threads(2)
    in_threads = Filled(MIXED, torch.float32).attend(attention.over)
    rng = random.Random(3)
    order = rng.sample(range(len(MIXED)), len(MIXED))
    filled = Filled(MIXED, torch.float32)
    rows = [
        x.split([span.num_new for span in filled.spans]) for x in (filled.q, filled.k, filled.v)
    ]
    filled.q, filled.k, filled.v = (torch.cat([part[i] for i in order]) for part in rows)
    filled.spans = [filled.spans[i] for i in order]
    shuffled = filled.attend(attention.over)
    for i, place in enumerate(order):
        assert torch.equal(together[place], shuffled[i])
        assert torch.equal(together[place], in_threads[place])


def test_a_drafted_row_is_the_row_without_drafts():
    """The first of nine rows is to the last bit what it is alone."""
    attention = CpuAttention(torch.float32, DIM)
    drafted = Filled([(40, 9, None)], torch.float32)
    alone = Filled([(40, 9, None)], torch.float32)
    [nine] = drafted.attend(attention.over)
    alone.spans = [alone.spans[0]._replace(num_new=1)]
    alone.q, alone.k, alone.v = alone.q[:1], alone.k[:1], alone.v[:1]
    [one] = alone.attend(attention.over)
    assert torch.equal(nine[:1], one)


def test_what_it_serves():
    assert CpuAttention.serves(CPU, torch.float32, 32)
    assert not CpuAttention.serves(CPU, torch.float64, 32)
    assert not CpuAttention.serves(CPU, torch.float32, 36)
    assert not CpuAttention.serves(torch.device("cuda"), torch.float32, 32)
    assert attention_for(CPU, torch.float64, 32)
