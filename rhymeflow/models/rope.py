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


def fix_longrope(model: PreTrainedModel, config: Config) -> PreTrainedModel:
    """Fix the model's LongRoPE factors, if it has any, for the greatest length in the run; return
    the model. Raises `UserError` if the engine is vLLM and would scale attention differently."""
    length = _greatest_length(config, model.config.get_text_config().max_position_embeddings)
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


def _check_scale(rope_config: Any, scale: float) -> None:
    """Raise `UserError` if vLLM would scale attention differently: it ignores `factor` and
    `attention_factor`, and derives the scale from the two values below alone."""
    original = rope_config.rope_parameters["original_max_position_embeddings"]
    factor = max(rope_config.max_position_embeddings / original, 1.0)
    vllm_scale = math.sqrt(1.0 + math.log(factor) / math.log(original))
    if abs(scale - vllm_scale) > 1e-4:
        raise UserError(
            "rollout.engine = 'vllm': LongRoPE in the model's config.json (factor or "
            f"attention_factor) scales attention by {scale:.4f}, but vLLM would scale it by "
            f"{vllm_scale:.4f}; set rollout.engine = 'native'"
        )


def _greatest_length(config: Config, context: int) -> int:
    """Return the most tokens that a prompt and its response can have together in the run."""
    rollout, max_prompt = config.rollout, config.data.max_prompt_length
    if rollout.engine == "vllm":  # vLLM uses no other length
        return min(rollout.vllm_max_model_length or context, context)
    if max_prompt is None:
        return context
    max_responses = [rollout.max_completion_length]
    max_responses += [suite.max_completion_length or 0 for suite in config.eval.suites]
    return min(max_prompt + max(max_responses), context)
