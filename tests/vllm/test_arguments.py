"""What vLLM is asked for, from the configuration; vLLM is not needed."""

import time
from importlib import import_module

import pytest

from rhymeflow.config import Config
from rhymeflow.engine.vllm import proposer, speculator, worker
from rhymeflow.engine.vllm.llm import engine_args, max_length
from rhymeflow.engine.vllm.vllm_engine import timer


def config(**sections):
    return Config.model_validate({"model": {"device": "cpu"}} | sections)


@pytest.mark.parametrize("path", [proposer.METHOD["model"], worker.PATH])
def test_what_vllm_loads_by_name_is_there(path):
    module, _, name = path.rpartition(".")
    assert isinstance(getattr(import_module(module), name), type)


def test_a_proposer_of_nothing():
    assert proposer.NoProposals(None).propose([[1], [], [2, 3]], None, None) == [[], [], []]


def test_drafts_have_room_beside_prompts():
    rollout = {"max_num_seqs": 10, "max_prefill_tokens": 100}
    drafted = engine_args(config(rollout=rollout, drafting={"max_draft": 4}))
    assert drafted["speculative_config"]["num_speculative_tokens"] == 4
    assert drafted["max_num_batched_tokens"] == 100 + 10 * 5
    plain = engine_args(config(rollout=rollout, drafting={"window": "off"}))
    assert "speculative_config" not in plain
    assert plain["max_num_batched_tokens"] == 110


def test_drafts_of_the_second_runner_load_no_model():
    rollout = {"vllm_model_runner": "v2"}
    pytest.importorskip("vllm.v1")  # whose logits processors are made a class of
    found = engine_args(config(rollout=rollout, drafting={"max_draft": 4}))
    assert found["speculative_config"] == speculator.METHOD | {"num_speculative_tokens": 4}


def test_the_length_is_the_models_unless_less_is_asked_for():
    assert max_length(config()) == 768
    assert max_length(config(rollout={"vllm_max_model_length": 100})) == 100
    assert max_length(config(rollout={"vllm_max_model_length": 10_000})) == 768


def test_memory_and_precision():
    found = engine_args(config(rollout={"vllm_kv_cache_gb": 0.5, "vllm_head_dtype": "float32"}))
    assert found["kv_cache_memory_bytes"] == 500_000_000
    assert found["hf_overrides"] == {"head_dtype": "float32"}
    assert found["dtype"] == "float32"  # the demo is small


def test_one_thread_is_timed_by_the_processors_clock(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert timer(config()) is time.process_time
    assert timer(config(rollout={"vllm_tensor_parallel_size": 2, "engine": "vllm"})) is (
        time.perf_counter
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert timer(config()) is time.perf_counter
