"""Which models vLLM is given: what it has is its own answer, refused in one line by name."""

from importlib import import_module

import pytest
import torch
from transformers import LlamaConfig

from rhymeflow.config import Config
from rhymeflow.engine.vllm import supported
from rhymeflow.engine.vllm.arguments import engine_args
from rhymeflow.engine.vllm.supported import architectures, check_supported
from rhymeflow.models.load import check_engine, check_native, load_config
from tests.characters import make_tokenizer
from tests.families.cases import config_of, save
from tests.refused import refusal
from tests.vllm.sameness import needs_vllm

OWN = "vllm.model_executor.models.qwen3_next"
BORROWED = "vllm.model_executor.models.transformers"


def config(path, **rollout):
    sections = {"model": {"name": str(path), "device": "cpu"}, "rollout": rollout}
    return Config.model_validate(sections | {"drafting": {"window": "off"}})


def saved(path, hf_config):
    hf_config.save_pretrained(path)
    return config(path, engine="vllm")


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(supported, "resolve_device", lambda model: torch.device("cuda"))


def test_layers_that_carry_a_state_need_a_model_of_vllms_own(tmp_path, on_a_gpu):
    chosen = saved(tmp_path, config_of("qwen3_next"))
    assert "set rollout.engine = 'vllm'" in refusal(check_native, chosen.model)
    check_supported(chosen, {"Qwen3NextForCausalLM": OWN})
    for known in ({}, {"Qwen3NextForCausalLM": BORROWED}):
        message = refusal(check_supported, chosen, known)
        assert "has no Qwen3NextForCausalLM" in message
        assert str(tmp_path) in message
    several = config(tmp_path, engine="vllm", vllm_tensor_parallel_size=2)
    message = refusal(check_supported, several, {"Qwen3NextForCausalLM": OWN})
    assert "rollout.vllm_tensor_parallel_size = 2" in message


def test_on_cpus_layers_that_carry_a_state_are_those_that_were_compared(tmp_path):
    known = dict.fromkeys(["Lfm2ForCausalLM", "Qwen3NextForCausalLM"], OWN)
    message = refusal(check_supported, saved(tmp_path, config_of("qwen3_next")), known)
    assert (
        "but for models of type falcon_h1, granitemoehybrid, lfm2, nemotron_h; run it on a"
        in message
    )
    assert str(tmp_path) in message
    chosen = saved(tmp_path, config_of("lfm2"))
    check_supported(chosen, known)
    assert "compilation_config" in engine_args(chosen)
    drafting = chosen.changed(drafting={"window": "cost"})
    assert "set drafting.window = 'off'" in refusal(check_supported, drafting, known)
    attends = config_of("lfm2", layer_types=["full_attention"] * 2)
    check_supported(saved(tmp_path, attends).changed(drafting={"window": "cost"}), known)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nemotron_h", "has no experts without gates"),
        ("granitemoehybrid", "mamba_n_groups = 2 in"),
        ("gemma4", "attention_k_eq_v in"),
    ],
)
def test_what_vllm_has_not_or_computes_otherwise_is_refused(name, says, tmp_path):
    chosen = saved(tmp_path, config_of(name))
    known = dict.fromkeys(architectures(load_config(chosen.model)), OWN)
    assert says in refusal(check_supported, chosen, known)


@pytest.mark.parametrize("name", ["falcon_h1", "lfm2"])
def test_a_dry_run_refuses_drafts_with_such_layers_on_cpus(
    name, tmp_path, refused, monkeypatch, capsys
):
    monkeypatch.setattr("rhymeflow.check.check_installed", lambda config: None)
    known = dict.fromkeys(["FalconH1ForCausalLM", "Lfm2ForCausalLM"], OWN)
    monkeypatch.setattr(supported, "ask", lambda config: known)
    save(name, tmp_path)
    make_tokenizer("0123456789+", 100).save_pretrained(tmp_path)
    capsys.readouterr()  # how saving goes
    where = ("--model.name", str(tmp_path), "--model.device", "cpu", "--rollout.engine", "vllm")
    message = refused("train", "demo", *where, "--drafting.window", "cost", "--dry-run")
    assert "drafting.window = 'cost': on CPUs vLLM" in message
    assert message.endswith("set drafting.window = 'off'")


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("gpt_oss", "set rollout.engine = 'native'"),
        ("deepseek_v3", "set rollout.engine = 'native'"),
        ("kimi_linear", "`rhymeflow sft` alone trains it"),
    ],
)
def test_what_vllm_has_in_another_form_is_refused_by_name(name, instead, tmp_path, on_a_gpu):
    chosen = saved(tmp_path, config_of(name))
    (architecture,) = architectures(load_config(chosen.model))
    for message in (
        refusal(check_supported, chosen, {architecture: OWN}),
        refusal(check_engine, chosen),  # wherever vLLM is
    ):
        assert f"a model of type {name!r} has" in message
        assert instead in message


def test_vllm_makes_a_model_of_16_or_32_bits_of_a_quantized_one(tmp_path):
    chosen = saved(tmp_path, LlamaConfig())
    plain = engine_args(chosen)
    chosen = saved(tmp_path, LlamaConfig(quantization_config={"quant_method": "fp8"}))
    assert engine_args(chosen) == plain | {"hf_overrides": {"quantization_config": None}}
    hf_config = config_of("qwen3_5")
    hf_config.quantization_config = {"quant_method": "fp8"}
    text_config = engine_args(saved(tmp_path, hf_config))["hf_overrides"](hf_config)
    assert getattr(text_config, "quantization_config", None) is None


def test_others_are_left_to_vllm(tmp_path):
    chosen = saved(tmp_path, LlamaConfig(architectures=["LlamaForCausalLM"]))
    check_supported(chosen, {})
    assert "hf_overrides" not in engine_args(chosen)


def test_of_a_model_with_a_part_for_images_vllm_runs_the_text_model(tmp_path):
    hf_config = config_of("qwen3_5")
    hf_config.architectures = ["Qwen3_5ForConditionalGeneration"]
    chosen = saved(tmp_path, hf_config)
    assert architectures(load_config(chosen.model)) == ["Qwen3_5ForCausalLM"]
    text_config = engine_args(chosen)["hf_overrides"](hf_config)
    assert text_config.architectures == ["Qwen3_5ForCausalLM"]
    assert text_config.model_type == "qwen3_5_text"


@needs_vllm
@pytest.mark.vllm
def test_this_vllm_has_these(tmp_path, on_a_gpu):
    import_module("rhymeflow.engine.vllm.arguments").import_vllm()
    groups = {"granitemoehybrid": {"mamba_n_groups": 1}}
    known = import_module("rhymeflow.engine.vllm.supported").known_models()
    for name in ("qwen3_next", "qwen3_5", "nemotron_h", "granitemoehybrid", "falcon_h1", "lfm2"):
        check_supported(saved(tmp_path / name, config_of(name, **groups.get(name, {}))), known)
    assert "has no BambaForCausalLM" in refusal(
        check_supported, saved(tmp_path / "bamba", config_of("bamba")), known
    )
