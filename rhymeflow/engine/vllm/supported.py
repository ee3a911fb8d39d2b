"""Asks vLLM which models it has, in the Python that has vLLM.

vLLM runs a model of transformers that it does not have by transformers' own modules. That is no
answer for layers that carry a state, which it keeps in its cache only for models of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from rhymeflow.config import Config
from rhymeflow.engine.vllm.installed import SUPPORTED, printed
from rhymeflow.errors import UserError
from rhymeflow.models.adapter_files import adapter_for
from rhymeflow.models.families import carries_state, check_vllm
from rhymeflow.models.load import load_config
from rhymeflow.models.precision import resolve_device

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Ends of fields of a mixture's configuration. Beside an adapter vLLM computes experts in another
way."""
_ON_CPUS = ("falcon_h1", "granitemoehybrid", "lfm2", "nemotron_h")
"""Types with such layers whose log-probabilities in vLLM on CPUs tests compare."""
_ASK = """
import json
from rhymeflow.engine.vllm.supported import known_models
print(json.dumps(known_models()))
"""


def architectures(hf_config: PreTrainedConfig) -> list[str]:
    """Return the classes of the model by which vLLM looks for its own; without the parts for
    images, if it has some, which the learner does not have either."""
    causal_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    names: list[str] | None = hf_config.architectures
    if names and hf_config.get_text_config() is hf_config:
        return names
    return [causal_class.__name__]


def known_models() -> dict[str, str]:
    """Return the module of each class of models that this Python's vLLM has."""
    from vllm.model_executor.models.registry import ModelRegistry

    return {name: getattr(each, "module_name", "") for name, each in ModelRegistry.models.items()}


def check_supported(config: Config, known: Mapping[str, str]) -> None:
    """Raise `UserError` unless vLLM, with `known_models` of these, can run the model."""
    hf_config = load_config(config.model)
    check_vllm(config.model.name, hf_config.to_dict())
    names = architectures(hf_config)
    modules = [known[name] for name in names if name in known]
    is_own = any(not module.endswith(".transformers") for module in modules)
    if getattr(hf_config.get_text_config(), "attention_k_eq_v", None):  # Gemma 4
        raise UserError(
            f"rollout.engine = 'vllm': attention_k_eq_v in config.json of model.name = "
            f"{config.model.name!r}: vLLM {SUPPORTED} has weights for values, which the model has "
            "not; set rollout.engine = 'native'"
        )
    if adapter_for(config.model) is not None:
        check_adapted(config, hf_config)
    if not carries_state(hf_config.to_dict()):
        return
    if config.rollout.vllm_tensor_parallel_size > 1:
        raise UserError(
            f"rollout.vllm_tensor_parallel_size = {config.rollout.vllm_tensor_parallel_size}: "
            f"layers that carry a state, as those of model.name = {config.model.name!r}, are not "
            "spread over processes"
        )
    if resolve_device(config.model).type == "cpu":
        _check_on_cpus(config, hf_config)
    if hf_config.model_type == "granitemoehybrid" and hf_config.mamba_n_groups > 1:
        raise UserError(
            f"rollout.engine = 'vllm': mamba_n_groups = {hf_config.mamba_n_groups} in config.json "
            f"of model.name = {config.model.name!r}: vLLM {SUPPORTED} would normalise by groups, "
            "which models of this type do not"
        )
    if not is_own:
        raise UserError(
            f"rollout.engine = 'vllm': vLLM {SUPPORTED} has no {' or '.join(names)} "
            f"(model.name = {config.model.name!r}), whose layers carry a state from token to token"
        )


def _check_on_cpus(config: Config, hf_config: PreTrainedConfig) -> None:
    if hf_config.model_type == "nemotron_h" and "moe" in hf_config.layers_block_type:
        raise UserError(
            f"rollout.engine = 'vllm': on CPUs vLLM {SUPPORTED} has no experts without gates, as "
            f"those of model.name = {config.model.name!r}; run it on a GPU"
        )
    if hf_config.model_type not in _ON_CPUS:
        raise UserError(
            f"rollout.engine = 'vllm': on CPUs vLLM {SUPPORTED} was not shown to compute layers "
            f"that carry a state, as those of model.name = {config.model.name!r}, but for models "
            f"of type {', '.join(_ON_CPUS)}; run it on a GPU"
        )
    if config.drafting.window != "off":
        raise UserError(
            f"drafting.window = {config.drafting.window!r}: on CPUs vLLM {SUPPORTED} forgets no "
            f"rejected draft in layers that carry a state, as those of model.name = "
            f"{config.model.name!r}; set drafting.window = 'off'"
        )


def check_adapted(config: Config, hf_config: PreTrainedConfig) -> None:
    """Raise `UserError` unless vLLM computes an adapter of the model."""
    fields = hf_config.get_text_config().to_dict().items()
    if any(name.endswith(_EXPERTS) and value for name, value in fields):
        raise UserError(
            f"model.lora: vLLM {SUPPORTED} is not used for an adapter of a mixture of experts, as "
            f"model.name = {config.model.name!r} is; rollout.engine = 'native' samples from it"
        )


def ask(config: Config) -> dict[str, str]:
    """Return `known_models` of the Python that the rollout instances run under."""
    problem = "rollout.engine = 'vllm': vLLM cannot be imported"
    return printed(config.rollout.python or sys.executable, _ASK, problem)
