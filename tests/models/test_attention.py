"""The seam: what a model asks of its attention beyond what is done is refused by name."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, masking_utils

from rhymeflow.errors import UserError
from rhymeflow.models.attention import Shape, _attention_function, attending
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

    def attend(self, layer, q_HTD, k_GTD, v_GTD, scale):
        return (q_HTD + k_GTD.sum(0) + v_GTD.sum(0)).transpose(0, 1)


class Layer(nn.Module):
    config, layer_idx = LlamaConfig(), 0


def call(attention, *, heads=4, keys=(2, 3, 8), values=(2, 3, 8), mask=None, **given):
    q, k, v = torch.ones(1, heads, 3, 8), torch.ones(1, *keys), torch.ones(1, *values)
    with attending(attention):
        return _attention_function(Layer(), q, k, v, mask, 1.0, **given)[0]


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
        ({"sliding_window": 8}, "attention with sliding_window"),
        ({"softcap": 50.0, "s_aux": torch.ones(4)}, "attention with s_aux, softcap"),
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
