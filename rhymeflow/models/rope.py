"""Chooses LongRoPE's factors once for a run.

transformers uses the long factors for a whole call if any position in it is beyond the length of
the model's original training, so a response would depend on others in its batch (law 3). Here the
greatest length in the run decides, as in vLLM.
"""

from __future__ import annotations

import math
from typing import Any

from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rhymeflow.config import Config
from rhymeflow.errors import UserError


def settled(model: PreTrainedModel, config: Config) -> PreTrainedModel:
    """Fix the model's LongRoPE factors for the lengths of `config`, in place; return the model.
    Raises `UserError` if the engine is vLLM, and would scale attention differently."""
    length = _longest(config, model.config.get_text_config().max_position_embeddings)
    for module in model.modules():
        if getattr(module, "rope_type", None) == "longrope":
            rotary: Any = module
            init = ROPE_INIT_FUNCTIONS["longrope"]
            inv_freq, scale = init(rotary.config, rotary.inv_freq.device, seq_len=length)
            if config.rollout.engine == "vllm":
                _check_scale(rotary.config, scale)
            # transformers chooses between these two in each call.
            rotary.original_inv_freq = rotary.long_inv_freq = inv_freq
    return model


def _check_scale(text: Any, scale: float) -> None:
    """Raise `UserError` if vLLM, which uses the two lengths alone, computes another scale."""
    original = text.rope_parameters["original_max_position_embeddings"]
    factor = max(text.max_position_embeddings / original, 1.0)
    vllm_scale = math.sqrt(1.0 + math.log(factor) / math.log(original))
    if abs(scale - vllm_scale) > 1e-4:
        raise UserError(
            f"rollout.engine = 'vllm': the model's config.json has LongRoPE scale attention by "
            f"{scale:.4f} (factor or attention_factor), vLLM would by {vllm_scale:.4f}; use native"
        )


def _longest(config: Config, context: int) -> int:
    rollout, prompt = config.rollout, config.data.max_prompt_length
    if rollout.engine == "vllm":  # vLLM uses no other length
        return min(rollout.vllm_max_model_length or context, context)
    if prompt is None:
        return context
    responses = [rollout.max_completion_length]
    responses += [suite.max_completion_length or 0 for suite in config.eval.suites]
    return min(prompt + max(responses), context)
