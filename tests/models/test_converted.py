"""GGUF conversion: once, whole or not at all, and with the numbers the file holds."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rhymeflow.config import ModelConfig
from rhymeflow.models import converted as module
from rhymeflow.models.converted import converted
from rhymeflow.models.load import load_config, load_model
from rhymeflow.models.tokenizer import load_tokenizer
from tests.refused import refusal

gguf = pytest.importorskip("gguf")
CPU = torch.device("cpu")
HIDDEN, HEADS, KV_HEADS, MLP, LAYERS = 32, 4, 2, 48, 1
KV = HIDDEN // HEADS * KV_HEADS


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rhymeflow" / "converted"


@pytest.fixture
def gguf_file(tmp_path):
    """A Llama of one layer with a byte-pair tokenizer of single characters, in GGUF."""
    path = tmp_path / "tiny.gguf"
    tokens = ["<unk>", "<eos>", *"0123456789", *"abcdef", "12"]
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "name": "tiny", "context_length": 64, "embedding_length": HIDDEN, "block_count": LAYERS,
        "feed_forward_length": MLP, "head_count": HEADS, "head_count_kv": KV_HEADS,
        "rope_dimension_count": HIDDEN // HEADS, "layer_norm_rms_eps": 1e-5,
        "rope_freq_base": 10_000.0, "vocab_size": len(tokens), "tokenizer_model": "gpt2",
        "token_list": tokens, "token_types": [3, 3] + [1] * (len(tokens) - 2),
        "token_merges": ["1 2"], "unk_token_id": 0, "eos_token_id": 1,
    }.items():  # fmt: skip
        getattr(writer, f"add_{name}")(value)
    noise = torch.Generator().manual_seed(0)

    layer = {
        "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (KV, HIDDEN), "attn_v": (KV, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (MLP, HIDDEN), "ffn_up": (MLP, HIDDEN),
        "ffn_down": (HIDDEN, MLP),
    }  # fmt: skip
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    for name, shape in (shapes | {f"blk.0.{name}": shape for name, shape in layer.items()}).items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape, generator=noise).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_converted_weights_are_those_of_the_file(gguf_file):
    """The first thing that is asked for, its configuration, needs the file converted."""
    assert load_config(ModelConfig(name=str(gguf_file.parent))).num_hidden_layers == LAYERS
    model = load_model(ModelConfig(name=str(gguf_file.parent)), dtype=torch.float32, device=CPU)
    plain = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32
    )
    assert dict(model.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter)
    with torch.no_grad():  # training a loaded model leaves the cache alone
        model.lm_head.weight.zero_()
    again = load_model(ModelConfig(name=str(gguf_file.parent)), dtype=torch.float32, device=CPU)
    assert torch.equal(again.lm_head.weight, plain.lm_head.weight)
    tokenizer = load_tokenizer(ModelConfig(name=str(gguf_file.parent)))
    assert tokenizer.decode(tokenizer.encode("ab12")) == "ab12"


def test_it_is_converted_once_for_each_content(gguf_file, monkeypatch, cache):
    first = converted(gguf_file)
    assert "quantization_config" not in json.loads((first / "config.json").read_text())
    with monkeypatch.context() as patched:
        patched.setattr(module, "_convert", lambda *_: pytest.fail("converted again"))
        assert converted(gguf_file) == first
    assert [path.name for path in cache.iterdir()] == [first.name]
    content = bytearray(gguf_file.read_bytes())
    content[-1] ^= 1
    gguf_file.write_bytes(content)
    assert converted(gguf_file) != first


def test_a_conversion_that_dies_leaves_nothing(gguf_file, monkeypatch, cache):
    def dies(source, target):
        Path(target).mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_convert", dies)
    with pytest.raises(KeyboardInterrupt):
        converted(gguf_file)
    assert list(cache.iterdir()) == []


def test_the_slower_of_two_conversions_takes_the_other_ones(gguf_file, monkeypatch):
    real = module._convert

    def overtaken(source, target):
        monkeypatch.setattr(module, "_convert", real)
        converted(gguf_file)
        real(source, target)

    monkeypatch.setattr(module, "_convert", overtaken)
    assert (converted(gguf_file) / "model.safetensors").is_file()


def test_missing_package_bad_file_and_unwritable_cache_are_named(gguf_file, tmp_path, monkeypatch):
    bad = tmp_path / "bad" / "bad.gguf"
    bad.parent.mkdir()
    bad.write_bytes(b"not a model")
    assert "bad.gguf cannot be read as a GGUF model" in refusal(converted, bad)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "XDG_CACHE_HOME" in refusal(converted, gguf_file)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install gguf" in refusal(converted, gguf_file)
