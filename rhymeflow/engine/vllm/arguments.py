"""How vLLM is imported, and the arguments of its engine."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from rhymeflow.config import Config
from rhymeflow.engine.vllm import speculator, worker
from rhymeflow.engine.vllm.sampler import noise_processor
from rhymeflow.models.load import load_config, resolve_dtype
from rhymeflow.models.precision import resolve_device
from rhymeflow.models.source import readable

CPU_BLOCK = 32
"""Tokens of a block of the KV cache on CPUs: the kernels want multiples of it, and only whole
blocks of a prompt are shared, so the 128 that vLLM takes would share nothing of short prompts."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # Threads and cores are those that the run gives its workers.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
}
"""Variables that vLLM must find."""


def import_vllm() -> None:
    """Import vLLM with the variables that it must find: seconds, the first time."""
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    dispatcher: Any = importlib.import_module("vllm.triton_utils.dispatcher")
    dispatcher.vars = _vars


def _vars(value: object) -> Mapping[str, Any]:
    # vLLM looks at every global of every module for kernels to replace. llvmlite, which numba
    # loads, has one that answers to any name, `__dict__` included, with a function.
    found: Any = vars(value)
    return found if isinstance(found, Mapping) else {}


def max_length(config: Config) -> int:
    """Most tokens that a prompt and its response can have together."""
    text = load_config(config.model).get_text_config()
    own: int = text.max_position_embeddings
    return min(config.rollout.vllm_max_model_length or own, own)


def engine_args(config: Config) -> dict[str, Any]:
    """vLLM's arguments."""
    rollout, drafting = config.rollout, config.drafting
    device = resolve_device(config.model)
    drafts, is_second = drafting.window != "off", rollout.vllm_model_runner == "v2"
    rows = 1 + drafting.max_draft if drafts else 1
    arguments: dict[str, Any] = {
        "model": readable(config.model).location,
        "dtype": str(resolve_dtype(config.model, device)).removeprefix("torch."),
        "skip_tokenizer_init": True,
        "load_format": "dummy",  # the learner's are pulled
        "generation_config": "vllm",
        "max_model_len": max_length(config),
        "max_num_seqs": rollout.max_num_seqs,
        # vLLM counts tokens that are decoded too.
        "max_num_batched_tokens": rollout.max_prefill_tokens + rollout.max_num_seqs * rows,
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "scheduling_policy": "priority",
        "tensor_parallel_size": rollout.vllm_tensor_parallel_size,
        "worker_extension_cls": worker.PATH,
        "disable_log_stats": True,
    }
    if drafts:
        method = speculator.SPECULATOR if is_second else speculator.PROPOSER
        arguments["speculative_config"] = method | {"num_speculative_tokens": drafting.max_draft}
    if is_second:
        arguments["logits_processors"] = [noise_processor()]
        arguments["logprobs_mode"] = "processed_logits"
    if rollout.vllm_head_dtype == "float32":
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    if device.type == "cpu":
        # Compiled code would hold on to what was packed when it was traced.
        arguments |= {
            "enforce_eager": True,
            "block_size": CPU_BLOCK,
            "kv_cache_memory_bytes": int(rollout.vllm_kv_cache_gb * 1e9),
        }
    else:
        arguments["gpu_memory_utilization"] = rollout.vllm_gpu_memory_utilization
        arguments["moe_backend"] = "triton"  # it takes experts' weights as they are published
    return arguments
