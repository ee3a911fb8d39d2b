"""Imports vLLM, and builds the arguments of its engine."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from transformers import PreTrainedConfig

from rhymeflow.config import Config
from rhymeflow.engine.vllm import speculator, worker
from rhymeflow.engine.vllm.adapter import adapter_args
from rhymeflow.engine.vllm.sampler import noise_processor
from rhymeflow.engine.vllm.supported import architectures
from rhymeflow.models.families import carries_state
from rhymeflow.models.load import load_config, resolve_dtype
from rhymeflow.models.precision import resolve_device
from rhymeflow.models.source import readable

CPU_BLOCK = 32
"""Tokens per block of the KV cache on CPUs. The kernels need multiples of 32, and only whole blocks
of a prompt are shared, so vLLM's default of 128 would share nothing of short prompts."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # The run itself assigns threads and cores to its workers.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
}
"""Environment variables that vLLM needs."""


def import_vllm() -> None:
    """Import vLLM with `ENVIRONMENT` set; the first import takes seconds."""
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    dispatcher: Any = importlib.import_module("vllm.triton_utils.dispatcher")
    dispatcher.vars = _vars


def _vars(value: object) -> Mapping[str, Any]:
    # vLLM looks through the globals of all modules for kernels to replace. One of llvmlite's, which
    # numba loads, returns a function for any attribute, `__dict__` included.
    attributes: Any = vars(value)
    return attributes if isinstance(attributes, Mapping) else {}


def max_length(config: Config) -> int:
    """Return the most tokens of a prompt and its response together."""
    context: int = load_config(config.model).get_text_config().max_position_embeddings
    return min(config.rollout.vllm_max_model_length or context, context)


def model_runner(config: Config) -> str:
    """Return vLLM's model runner, by default the one that it prefers on the device."""
    is_cpu = resolve_device(config.model).type == "cpu"
    return config.rollout.vllm_model_runner or ("v1" if is_cpu else "v2")


def _text_alone(overrides: dict[str, Any], hf_config: PreTrainedConfig) -> PreTrainedConfig:
    text_config = hf_config.get_text_config()
    text_config.update(overrides)
    return text_config


def _overrides(config: Config, *, is_cpu: bool) -> Any:
    """Return in what vLLM's model differs from the files' configuration; empty: in nothing."""
    hf_config, changed = load_config(config.model), dict[str, Any]()
    if (config.rollout.vllm_head_dtype or ("model" if is_cpu else "float32")) == "float32":
        changed["head_dtype"] = "float32"
    if getattr(hf_config, "quantization_config", None) is not None:
        changed["quantization_config"] = None  # the learner publishes converted weights
    if hf_config.get_text_config() is hf_config:
        return changed
    changed["architectures"] = architectures(hf_config)  # the learner has the text model alone
    return partial(_text_alone, changed)


def _on_cpus(config: Config) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        # Compiled code would keep the weights that were packed when it was traced.
        "enforce_eager": True,
        "block_size": CPU_BLOCK,
        "kv_cache_memory_bytes": int(config.rollout.vllm_kv_cache_gb * 1e9),
    }
    if carries_state(load_config(config.model).to_dict()):
        # LFM2's queries come as heads, of which vLLM's rotary kernel turns the first alone.
        arguments["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    return arguments


def engine_args(config: Config) -> dict[str, Any]:
    """Return the arguments of vLLM's `EngineArgs`."""
    rollout, drafting = config.rollout, config.drafting
    device = resolve_device(config.model)
    drafts, is_v2 = drafting.window != "off", model_runner(config) == "v2"
    rows = 1 + drafting.max_draft if drafts else 1
    arguments: dict[str, Any] = {
        "model": readable(config.model).location,
        "dtype": str(resolve_dtype(config.model, device)).removeprefix("torch."),
        "skip_tokenizer_init": True,
        "load_format": "dummy",  # the learner's weights are pulled later
        "generation_config": "vllm",
        "max_model_len": max_length(config),
        "max_num_seqs": rollout.max_num_seqs,
        # vLLM's limit includes decoded tokens.
        "max_num_batched_tokens": rollout.max_prefill_tokens + rollout.max_num_seqs * rows,
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "scheduling_policy": "priority",
        "tensor_parallel_size": rollout.vllm_tensor_parallel_size,
        "worker_extension_cls": worker.PATH,
        "disable_log_stats": True,
        **adapter_args(config),
    }
    if drafts:
        method = speculator.SPECULATOR if is_v2 else speculator.PROPOSER
        arguments["speculative_config"] = method | {"num_speculative_tokens": drafting.max_draft}
    if is_v2:
        arguments["logits_processors"] = [noise_processor()]
        arguments["logprobs_mode"] = "processed_logits"
    if overrides := _overrides(config, is_cpu=device.type == "cpu"):
        arguments["hf_overrides"] = overrides
    if device.type == "cpu":
        arguments |= _on_cpus(config)
    else:
        arguments["gpu_memory_utilization"] = rollout.memory_share
        arguments["enable_sleep_mode"] = rollout.vllm_sleeps
        arguments["moe_backend"] = "triton"  # it computes with experts' weights as published
    return arguments
