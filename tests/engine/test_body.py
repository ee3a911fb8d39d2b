"""Layers compute what transformers' modules do, and serve only what they can."""

import pytest
import torch
import torch.nn.functional as F

from rhymeflow.cpu import products
from rhymeflow.cpu.products import Packed, Repacked
from rhymeflow.engine.native.body import Layers, Modules, body_for
from rhymeflow.engine.native.cache import CacheSpan, KVCache
from rhymeflow.engine.native.cpu_attention import CpuAttention
from rhymeflow.models import attention
from rhymeflow.models.adapter_files import Adapter
from rhymeflow.models.lora import attach, versioned
from tests.learner.builders import tiny_model

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 16, 3
SIZES = {
    "vocab_size": 97, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "head_dim": DIM,
    "num_key_value_heads": KV_HEADS, "max_position_embeddings": 400, "initializer_range": 0.15,
    "hidden_size": 64, "intermediate_size": 96,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
KINDS = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral with a window": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen2 with windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "yarn": ("llama", {"rope_parameters": YARN}),
}


def model_of(kind, dtype):
    family, more = KINDS[kind]
    model = tiny_model(family, tied=False, **SIZES, **more).to(dtype)
    scramble(model)
    return model


def scramble(model):
    """Norms of ones and biases of zeros would hide that they are left out."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand_like(parameter) + 0.5)


def hidden_of(body, dtype, lengths):
    """The hidden states of sequences of such lengths, side by side, whose keys are not cached."""
    cache = KVCache(attention.Shape(LAYERS, KV_HEADS, DIM), dtype, CPU)
    spans = [CacheSpan(cache.reserve(None, 0, length), 0, length) for length in lengths]
    how = CpuAttention(dtype, DIM).over(spans)
    positions = [place for length in lengths for place in range(length)]
    ids = [(7 * i + i * i) % SIZES["vocab_size"] for i in range(sum(lengths))]
    with torch.inference_mode():
        return body.run(ids, positions, how)[: len(ids)]


CPU = torch.device("cpu")


CLOSE = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (0.05, 0.05)}
"""In bfloat16 a last bit of the attention's own sums may flip, and grow over the layers."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_same_as_the_modules_before_and_after_new_weights(kind, dtype):
    """Also at positions beyond those that there were before."""
    model = model_of(kind, dtype)
    body = body_for(model)
    assert isinstance(body, Layers)
    for lengths in ((5, 1, 17), (5, 9), (390,)):
        found, expected = hidden_of(body, dtype, lengths), hidden_of(Modules(model), dtype, lengths)
        if dtype == torch.bfloat16:  # it is rounded where the modules round
            assert (found != expected).float().mean() < 0.05
        rtol, atol = CLOSE[dtype]
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)
        body.refresh()


@pytest.mark.parametrize(
    "what", ["another class", "another gate", "changing angles", "part of a head"]
)
def test_other_models_run_by_their_modules(what):
    model = model_of("llama", torch.float32)
    if what == "another class":
        model = tiny_model("gemma", **SIZES)
    elif what == "another gate":
        model.config.hidden_act = "gelu"
    elif what == "changing angles":
        model.base_model.rotary_emb.rope_type = "dynamic"
    else:
        model.base_model.rotary_emb.inv_freq = torch.ones(DIM // 4)
    assert isinstance(body_for(model), Modules)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_packed_again_is_the_weight_packed(dtype):
    weight_OI = torch.randn(70, 24).to(dtype)
    product, x_TI = Repacked(weight_OI), torch.randn(40, 24).to(dtype)
    for _ in range(2):
        weight_OI.copy_(torch.randn(70, 24))
        product.refresh()
        assert torch.equal(product(x_TI), Packed(weight_OI.clone(), None)(x_TI))
        torch.testing.assert_close(product(x_TI), F.linear(x_TI, weight_OI))
    if dtype == torch.float32:  # a row depends on itself alone
        assert torch.equal(product(x_TI)[:3], product(x_TI[:3]))


@pytest.mark.parametrize("kind", ["llama", "olmo2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_values_of_an_adapter_are_summed_into_what_is_packed(kind, dtype, monkeypatch):
    """To pack each matrix anew was most of what an instance stood still for."""
    attach(model := tiny_model(kind, **SIZES), Adapter(4, 8.0, False, ("all-linear",), ()))
    body = body_for(model.to(dtype))
    with torch.no_grad():
        for each in versioned(model).values():
            each.normal_(std=0.1)
    with monkeypatch.context() as patched:
        patched.setattr(products, "_packed", lambda weight_OI: pytest.fail("packed anew"))
        body.refresh()
    assert torch.equal(*(hidden_of(each, dtype, (5, 9)) for each in (body, body_for(model))))
