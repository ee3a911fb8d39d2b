"""Loading: right numbers, right names, and one clear line for each way a model can be unfit."""

import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    EncodecConfig,
    FalconConfig,
    Gemma2Config,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MusicgenConfig,
    MusicgenDecoderConfig,
    PhimoeConfig,
    Qwen2Config,
    Qwen3NextConfig,
    T5Config,
)

from rhymeflow.config import DataConfig, ModelConfig
from rhymeflow.data.encode import PromptEncoder
from rhymeflow.data.prompts import Prompt
from rhymeflow.engine.base import NoiseKey, Request
from rhymeflow.models import attention
from rhymeflow.models.load import (
    configured_stop_token_ids,
    count_parameters,
    empty_model,
    load_config,
    load_model,
    resolve_dtype,
    small_model,
    stop_token_ids,
)
from rhymeflow.models.precision import resolve_device
from rhymeflow.models.tokenizer import load_tokenizer
from tests.characters import make_tokenizer
from tests.engine.models import make_engine, sampling
from tests.families.cases import config_of as family_config
from tests.families.cases import save
from tests.refused import refusal

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}


def save_tokenizer(directory):
    tokenizer = make_tokenizer("0123456+", 100)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(directory)


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    return tmp_path


def config_of(path, **fields):
    return ModelConfig(name=str(path), **fields)


@pytest.mark.parametrize("tied", [True, False])
def test_a_loaded_model_is_the_plain_one_and_an_empty_one_has_its_shapes(tmp_path, tied):
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)).save_pretrained(tmp_path)
    config = config_of(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    full = load_model(config, dtype=torch.bfloat16, device=CPU)
    assert not full.training
    assert full.config._attn_implementation == attention.NAME
    for name, parameter in plain.named_parameters():
        assert torch.equal(full.get_parameter(name), parameter)
    empty = empty_model(config, dtype=torch.bfloat16, device=CPU)
    assert empty.generation_config.eos_token_id == full.generation_config.eos_token_id == 1

    def shapes(model):
        return {name: (p.shape, p.dtype) for name, p in model.named_parameters()}

    assert shapes(empty) == shapes(full) == shapes(plain)
    assert all(parameter.isnan().all() for parameter in empty.parameters())
    buffers = dict(full.named_buffers())
    assert dict(empty.named_buffers()).keys() == buffers.keys()
    for name, buffer in empty.named_buffers():
        assert buffer.dtype == buffers[name].dtype
        assert torch.equal(buffer, buffers[name])
    assert count_parameters(load_config(config)) == sum(p.numel() for p in full.parameters())


def test_tokenizer_gets_a_pad_token_and_stop_tokens_come_from_everywhere(checkpoint):
    tokenizer = load_tokenizer(config_of(checkpoint))
    assert tokenizer.pad_token == tokenizer.eos_token == "<eos>"
    assert tokenizer.decode(tokenizer.encode("12+3")).replace(" ", "") == "12+3"
    model = load_model(config_of(checkpoint), dtype=torch.float32, device=CPU)
    model.generation_config.eos_token_id = [7, 8]
    assert stop_token_ids(model, tokenizer) == {1, 7, 8}
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    tokenizer.eos_token = None
    assert "end-of-sequence" in refusal(stop_token_ids, model, tokenizer)


@pytest.mark.parametrize("name", ["ernie4_5_moe", "hunyuan_v1_moe", "glm4_moe"])
def test_routers_have_the_precision_of_other_weights(tmp_path, name):
    save(name, tmp_path)
    how = {"dtype": torch.bfloat16, "device": CPU}
    for make in (load_model, empty_model):
        parameters = make(config_of(tmp_path), **how).parameters()
        assert {each.dtype for each in parameters} == {torch.bfloat16}


def test_a_given_precision_is_kept_and_a_gpu_that_is_not_there_is_an_error(checkpoint, monkeypatch):
    assert resolve_dtype(config_of(checkpoint), CPU) == torch.float32
    assert resolve_dtype(config_of(checkpoint, dtype="bfloat16"), CPU) == torch.bfloat16
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device(ModelConfig()) == CPU
    assert "model.device = 'cuda'" in refusal(resolve_device, ModelConfig(device="cuda"))


CHUNKS_OF_NONE = Llama4TextConfig(
    attention_chunk_size=None, num_hidden_layers=1, layer_types=["chunked_attention"]
)
SEVERAL = MusicgenConfig(
    text_encoder=T5Config().to_dict(),
    audio_encoder=EncodecConfig().to_dict(),
    decoder=MusicgenDecoderConfig().to_dict(),
)


@pytest.mark.parametrize(
    ("unfit", "what"),
    [
        (Gemma2Config(sliding_window=None), "sliding_attention, but no sliding_window in its"),
        (
            MistralConfig(sliding_window=-1),
            "has sliding_window = -1 in its config.json; at least 1",
        ),
        (
            LlamaConfig(sliding_window=4096),
            "has sliding_window in its config.json, which models of this type do not use",
        ),
        (
            PhimoeConfig(sliding_window=9, layer_types=["full_attention"] * 32),
            "has layer_types in its config.json",
        ),
        (MistralConfig(use_sliding_window=False), "has use_sliding_window in its config.json"),
        (Llama4TextConfig(), "scales queries by their place in a row"),
        (CHUNKS_OF_NONE, "chunked_attention, but no attention_chunk"),
        (FalconConfig(), "are not supported, since none was compared"),
        (BertConfig(), "not a decoder-only"),
        (T5Config(), "not a decoder-only"),
        (SEVERAL, "not a decoder-only language model"),
    ],
)
def test_unfit_models_are_named(tmp_path, unfit, what):
    Qwen2Config().save_pretrained(tmp_path)
    assert load_config(config_of(tmp_path)).model_type == "qwen2"
    unfit.save_pretrained(tmp_path)
    message = refusal(load_config, config_of(tmp_path))
    assert all(part in message for part in (what, str(tmp_path), unfit.model_type))


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_weights_that_are_no_numbers_or_not_there_are_named(checkpoint, value):
    name, file = "model.layers.0.mlp.up_proj.weight", checkpoint / "model.safetensors"
    said = f"1 of the 384 numbers of {name} are NaN or infinite"
    weights = load_file(file)
    if value is None:
        file.unlink()
        said = f"cannot be loaded from {checkpoint}: "
    else:
        weights[name][1, 2] = value
        save_file(weights, file, metadata={"format": "pt"})
    message = refusal(load_model, config_of(checkpoint), dtype=torch.float32, device=CPU)
    assert said in message


def test_weights_that_do_not_fit_are_named(checkpoint):
    sizes = {**SIZES, "num_hidden_layers": 3, "tie_word_embeddings": True}
    LlamaConfig(**sizes).save_pretrained(checkpoint)
    message = refusal(load_model, config_of(checkpoint), dtype=torch.float32, device=CPU)
    assert "the weights do not fit its config.json: has no model.layers.2." in message


def test_a_type_with_code_of_its_own_is_refused_and_nobody_is_asked(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda question: "y")
    fields = {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_k2.K2"}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert "models of type 'kimi_k2' are not" in refusal(load_config, config_of(tmp_path))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("model.layers.1.self_attn.q_proj.bias", "has model.layers.1.self_attn.q_proj.bias, for"),
        ("model.layers.1.self_attn.g_norm.weight", "has model.layers.1.self_attn.g_norm.weight"),
        ("lm_head.bias", "has lm_head.bias, for which there is no place"),
        ("model.layers.2.eh_proj.weight", None),  # predicts further tokens
        ("mtp.fc.weight", None),
        ("model.layers.1.self_attn.rotary_emb.inv_freq", None),
    ],
)
def test_a_weight_without_a_place_is_refused_but_not_a_part_by_itself(checkpoint, name, says):
    """A model with that weight computes something else, and transformers leaves it out."""
    config, file = config_of(checkpoint), checkpoint / "model.safetensors"
    save_file(load_file(file) | {name: torch.ones(16)}, file, metadata={"format": "pt"})
    how = {"dtype": torch.float32, "device": CPU}
    if says is None:
        load_model(config, **how)
    else:
        assert says in refusal(load_model, config, **how)


def add_to_config(directory, **fields):
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def in_fp8(weights, block=8):
    """As DeepSeek and Qwen publish theirs: a scale for each block of a layer's weight."""
    found = dict(weights)
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            rows, columns = (n // block for n in weight.shape)
            cut = weight.reshape(rows, block, columns, block)
            scale = cut.abs().amax((1, 3)) / 448
            packed = (cut / scale[:, None, :, None]).reshape(weight.shape)
            found |= {name: packed.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    return found


@pytest.mark.parametrize("has_gpu", [False, True])
def test_weights_in_fp8_are_converted(checkpoint, monkeypatch, has_gpu):
    config, file = config_of(checkpoint), checkpoint / "model.safetensors"
    plain = load_model(config, dtype=torch.float32, device=CPU)
    save_file(in_fp8(load_file(file)), file, metadata={"format": "pt"})
    add_to_config(
        checkpoint, quantization_config={"quant_method": "fp8", "weight_block_size": [8, 8]}
    )
    if has_gpu:  # there transformers would compute with them
        looks = "transformers.quantizers.quantizer_finegrained_fp8.FineGrainedFP8HfQuantizer"
        monkeypatch.setattr(f"{looks}.validate_environment", lambda self, **_: None)
    model = load_model(config, dtype=torch.float32, device=CPU)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    for name, each in model.named_parameters():
        torch.testing.assert_close(each, plain.get_parameter(name), rtol=0.07, atol=1e-3)
    check_saved(model, checkpoint / "saved")


def check_saved(model, directory):
    """A checkpoint of what was quantized is loaded as any other."""
    model.save_pretrained(directory)
    again = dict(load_model(config_of(directory), dtype=torch.float32, device=CPU).state_dict())
    torch.testing.assert_close(again, model.state_dict(), rtol=0, atol=0)


def test_experts_in_mxfp4_are_converted(tmp_path):
    """As gpt-oss has them: two numbers in a byte, a power of two for each 32."""
    save("gpt_oss", tmp_path, intermediate_size=32)
    file = tmp_path / "model.safetensors"
    weights, name = load_file(file), "model.layers.0.mlp.experts."
    for layer in range(2):
        for part, rows in ("gate_up_proj", 64), ("down_proj", 32):
            of = f"model.layers.{layer}.mlp.experts.{part}"
            del weights[of]
            weights[f"{of}_blocks"] = torch.arange(4 * rows * 16).reshape(4, rows, 1, 16).byte()
            weights[f"{of}_scales"] = torch.full((4, rows, 1), 126, dtype=torch.uint8)
    save_file(weights, file, metadata={"format": "pt"})
    add_to_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    model = load_model(config_of(tmp_path), dtype=torch.float32, device=CPU)
    experts = model.get_parameter(f"{name}gate_up_proj")
    assert experts.shape == (4, 32, 64)
    # The first row's bytes are 0 to 15: their low bits are the first number of each pair.
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]) / 2
    assert torch.equal(experts[0, ::2, 0], torch.cat([numbers, -numbers]))
    assert not experts[0, 1::2, 0].any()
    check_saved(model, tmp_path / "saved")


def test_other_quantized_weights_are_refused_by_their_method(checkpoint):
    add_to_config(checkpoint, quantization_config={"quant_method": "gptq", "bits": 4})
    message = refusal(load_config, config_of(checkpoint))
    assert "quantized (gptq) and cannot be trained; fp8 and mxfp4 are converted" in message


def test_hub_name_offline_says_what_was_tried_and_what_to_do(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refusal(load_config, ModelConfig(name="no-such-owner/no-such-model"))
    for part in ("no-such-owner/no-such-model", "HF_HUB_OFFLINE", "local directory", "hub name"):
        assert part in message


def test_tokens_that_the_model_has_no_embedding_of_are_refused_where_they_are_used(tmp_path):
    LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": 9})).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)  # "+" is its token 9
    tokenizer = load_tokenizer(config_of(tmp_path))
    encoder = PromptEncoder(tokenizer, DataConfig())
    assert encoder.encode(Prompt(0, "12", {}, "row 1")) == [3, 4]
    message = refusal(encoder.encode, Prompt(1, "1+2", {}, "row 2"))
    assert message.startswith("row 2: '+' is token 9 of the tokenizer, and the model")
    model = load_model(config_of(tmp_path), dtype=torch.float32, device=CPU)
    assert stop_token_ids(model, tokenizer) == {1}
    tokenizer.eos_token = "+"
    for find, of in (stop_token_ids, model), (configured_stop_token_ids, config_of(tmp_path)):
        message = refusal(find, of, tokenizer)
        assert re.search("its end-of-sequence token 9 .* is outside its vocabulary", message)
    request = Request(0, [3, 9], NoiseKey(0, 0, 0), sampling())
    assert "token 9 is outside the model's" in refusal(make_engine(model).submit, request)


def test_a_small_model_is_one_of_this_kind_and_needs_no_weights(tmp_path):
    sizes = {**SIZES, "num_hidden_layers": 5, "intermediate_size": 999, "vocab_size": 9999}
    windows = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1}
    Qwen2Config(**sizes, **windows).save_pretrained(tmp_path)
    model = small_model(config_of(tmp_path), device=CPU)
    reaches = [attention.Reach.of(model.config, layer) for layer in range(2)]
    assert reaches == [attention.Reach(), attention.Reach(window=4)], "which a proof shows"
    assert (len(model.model.layers), len(model.lm_head.weight)) == (2, 256)
    assert {p.isfinite().all().item() for p in model.parameters()} == {True}


def test_a_small_model_has_a_layer_of_each_kind(tmp_path):
    kinds = [*["linear_attention"] * 3, "full_attention"] * 2
    hybrid = Qwen3NextConfig(layer_types=kinds, num_hidden_layers=8, num_experts=4)
    hybrid.save_pretrained(tmp_path)
    model = small_model(config_of(tmp_path), device=CPU)
    assert model.config.layer_types == ["linear_attention", "full_attention"]
    assert len(model.model.layers) == 2


def test_a_small_model_has_layers_that_attend_to_keys_of_others_and_their_sizes(tmp_path):
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    sizes = {"num_hidden_layers": 6, "num_kv_shared_layers": 3, "layer_types": kinds * 2}
    family_config("gemma4_text", **sizes).save_pretrained(tmp_path)
    model = small_model(config_of(tmp_path), device=CPU)
    assert model.config.layer_types == kinds[1:] * 2
    assert model.config.kv_sharing_modes == ["store", "store", "reuse", "reuse"]
    assert [layer.self_attn.head_dim for layer in model.model.layers] == [16, 32] * 2
    assert len(model.model.embed_tokens_per_layer.weight) <= 256
