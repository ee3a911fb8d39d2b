"""Every slot keeps its own content while others come, grow and go."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.engine.native.cache import FIRST_CAPACITY, KVCache
from rhymeflow.models.attention import Shape

CPU = torch.device("cpu")
actions = st.lists(
    st.tuples(st.sampled_from(["new", "grow", "free", "copy"]), st.integers(0, 7)), max_size=30
)


def write(slot, start, end, value):
    slot.size_class.kv[:, :, slot.index, :, start:end] = value


@settings(max_examples=60)
@given(actions, st.lists(st.integers(1, 3 * FIRST_CAPACITY), min_size=30, max_size=30))
def test_contents_stay_with_their_slots(actions, lengths):
    cache = KVCache(Shape(1, 2, 1), torch.float32, CPU)
    kept = {}  # number: [slot, what its tokens must be]
    for number, ((action, which), length) in enumerate(zip(actions, lengths, strict=False)):
        chosen = sorted(kept)[which % len(kept)] if kept else None
        if action == "new" or chosen is None:
            kept[number] = [cache.reserve(None, length), [float(number + 1)] * length]
            write(kept[number][0], 0, length, number + 1)
        elif action == "grow":
            slot, tokens = kept[chosen]
            new = cache.reserve(slot, len(tokens) + length)
            write(new, len(tokens), len(tokens) + length, number + 1)
            kept[chosen] = [new, tokens + [float(number + 1)] * length]
        elif action == "copy":
            tokens = kept[chosen][1]
            slot = cache.reserve(None, len(tokens))
            cache.copy(kept[chosen][0], slot, len(tokens))
            kept[number] = [slot, tokens]
        else:
            cache.release(kept.pop(chosen)[0])
        for slot, tokens in kept.values():
            held = slot.size_class.kv[0, 1, slot.index, 1, : len(tokens), 0]
            assert held.tolist() == tokens
            assert slot.size_class.slots[slot.index] is slot
            assert slot.size_class.capacity < max(FIRST_CAPACITY + 1, 2 * len(tokens))
            assert torch.isfinite(slot.size_class.kv).all()
        assert sum(len(size_class.slots) for size_class in cache.size_classes.values()) == len(kept)
