"""The seam: what a model asks of its attention beyond what is done is refused by name."""

import pytest
import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    masking_utils,
)

from rhymeflow.errors import UserError
from rhymeflow.models.attention import Reach, Shape, Weighing, _attention_function, attending
from tests.engine.models import tiny_model

HARMLESS = {
    "dropout": 0.0,
    "position_ids": torch.arange(3)[None],
    "use_cache": False,
    "s_aux": None,
}


class Sums:
    """An attention that adds up what it is given."""

    def __init__(self, cache_shape=None):
        self.cache_shape, self.num_layers_called = cache_shape, 0

    def attend(self, layer, q_HTD, k_GTD, v_GTE, weighing):
        self.weighing, self.widths = weighing, [x.shape[-1] for x in (q_HTD, k_GTD, v_GTE)]
        ones = q_HTD.sum(-1, keepdim=True) + k_GTD.sum((0, 2))[:, None]
        return (ones + v_GTE.sum(0)).transpose(0, 1)


class Layer(nn.Module):
    layer_idx = 0

    def __init__(self, config):
        super().__init__()
        self.config = config


LLAMA = LlamaConfig()


def call(attention, *, heads=4, keys=(2, 3, 8), values=(2, 3, 8), mask=None, config=LLAMA, **given):
    q, k, v = torch.ones(1, heads, 3, 8), torch.ones(1, *keys), torch.ones(1, *values)
    with attending(attention):
        return _attention_function(Layer(config), q, k, v, mask, 1.0, **given)[0]


def test_what_changes_nothing_is_taken():
    assert call(Sums(Shape(1, 2, 8)), **HARMLESS).shape == (1, 3, 4, 8)


def test_transformers_makes_no_mask(monkeypatch):
    """Nor looks at the positions for sequences, which would wait for a GPU in each call."""
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", None)
    ids = torch.arange(6)[None]
    with attending(Sums()), torch.no_grad():
        tiny_model().base_model(input_ids=ids, position_ids=ids % 3, use_cache=False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mask": torch.zeros(1, 1, 3, 3)}, "attention with attention_mask"),
        ({"sliding_window": 8}, "attention with sliding_window = 8 in layer 0 where .* says None"),
        ({"position_bias": torch.zeros(1)}, "attention with position_bias"),
        ({"dropout": 0.1}, "attention with dropout"),
        ({"heads": 5}, "queries, keys and values of"),
        ({"keys": (2, 3, 6)}, "queries, keys and values of"),
        ({"values": (4, 3, 8)}, "queries, keys and values of"),
    ],
    ids=str,
)
@pytest.mark.parametrize("holds", [None, Shape(1, 2, 8)])
def test_more_is_refused(given, said, holds):
    with pytest.raises(UserError, match=f"a model of type 'llama' has {said}"):
        call(Sums(holds), **given)


def test_only_a_cache_minds_how_many_heads_there_are_and_how_wide():
    wide = {"values": (2, 3, 16)}
    for given in ({"keys": (4, 3, 8), "values": (4, 3, 8)}, wide):
        with pytest.raises(UserError, match="instead of the 2 of 8 in"):
            call(Sums(Shape(1, 2, 8)), **given)
    call(Sums(), keys=(4, 3, 8), values=(4, 3, 8))


def test_a_cache_gets_one_width_and_the_model_its_own():
    for values, width in (((2, 3, 16), 16), ((2, 3, 5), 8)):
        alone, cached = Sums(), Sums(Shape(1, 2, width))
        assert torch.equal(call(cached, values=values), call(alone, values=values))
        assert cached.widths == [width] * 3
        assert alone.widths == [8, 8, values[2]]


def test_the_layer_says_how_it_weighs_tokens():
    attention, sinks = Sums(), torch.ones(4)
    call(attention, softcap=50.0, s_aux=sinks)
    assert attention.weighing == Weighing(1.0, Reach(), 50.0, sinks)
    call(attention, config=MistralConfig(sliding_window=8), sliding_window=8)
    assert attention.weighing == Weighing(1.0, Reach(window=8))
    call(attention, config=MistralConfig(sliding_window=8))  # PhiMoE does not pass it on
    assert attention.weighing.reach == Reach(window=8)


def test_a_cache_that_gives_back_too_much_is_refused():
    with pytest.raises(UserError, match="attends further back than its config"):
        call(Sums(Shape(1, 2, 8, Reach(window=8))))


KINDS = ["sliding_attention", "full_attention"]
LLAMA4 = {"attention_chunk_size": 12, "num_hidden_layers": 2, "no_rope_layers": [1, 1]}


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (LLAMA, Shape(32, 32, 128)),
        (GPT2Config(), Shape(12, 12, 64)),
        (MistralConfig(sliding_window=8), Shape(32, 8, 128, Reach(window=8))),
        (Qwen2Config(num_hidden_layers=2), Shape(2, 32, 128)),
        (Gemma2Config(num_hidden_layers=2, layer_types=KINDS), Shape(2, 4, 256)),
        (
            Gemma2Config(num_hidden_layers=1, layer_types=KINDS[:1], sliding_window=9),
            Shape(1, 4, 256, Reach(window=9)),
        ),
        (CONFIG_MAPPING["llama4_text"](**LLAMA4), Shape(2, 8, 128, Reach(chunk=12))),
        (DeepseekV3Config(num_hidden_layers=2), Shape(2, 128, 192)),
    ],
    ids=lambda given: getattr(given, "model_type", ""),
)
def test_the_shape_is_read_from_the_configuration(config, shape):
    assert Shape.of(config) == shape


@pytest.mark.parametrize("reach", [Reach(), Reach(3), Reach(chunk=5), Reach(4, 6)], ids=str)
def test_a_reach_is_transformers_mask(reach):
    """And its first position is the first that it sees."""
    places = torch.arange(23)
    seen = reach.sees(places[:, None], places)
    expected = masking_utils.causal_mask_function
    if reach.window is not None:
        expected = masking_utils.sliding_window_causal_mask_function(reach.window)
    if reach.chunk is not None:
        chunked = masking_utils.chunked_causal_mask_function(reach.chunk, torch.zeros(1).long())
        expected = masking_utils.and_masks(expected, chunked)
    batch = torch.tensor(0)
    for query in range(23):
        row = [bool(expected(batch, batch, places[query], places[key])) for key in range(23)]
        assert seen[query].tolist() == row
        assert reach.first(query) == row.index(True)
