"""Chooses LongRoPE's factors once for a run.

transformers uses the long factors for a whole call if any position in it is beyond the length of
the model's original training, so a response would depend on others in its batch (law 3). Here the
greatest length in the run decides, as in vLLM."""

from __future__ import annotations

import math
from typing import Any

from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rhymeflow.config import Config
from rhymeflow.errors import UserError

FIXED = "fixed"  # the type of rotary frequencies of which nothing is chosen any more


def fix_longrope(model: PreTrainedModel, config: Config) -> PreTrainedModel:
    """Fix the model's LongRoPE factors, if it has any, for the greatest length in the run; return
    the model. Raises `UserError` if the engine is vLLM and would scale attention differently."""
    length = _greatest_length(config, model.config.get_text_config().max_position_embeddings)
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        # A model may have other rotary frequencies for each type of layers (Gemma 3).
        for layer_type, kind in list(kinds.items() if isinstance(kinds, dict) else [(None, kinds)]):
            if kind in ("longrope", FIXED):
                _fix(module, layer_type, length, is_vllm=config.rollout.engine == "vllm")
    return model


def _fix(rotary: Any, layer_type: str | None, length: int, *, is_vllm: bool) -> None:
    prefix = "" if layer_type is None else f"{layer_type}_"
    device = getattr(rotary, f"{prefix}inv_freq").device
    init = ROPE_INIT_FUNCTIONS["longrope"]
    inv_freq, scale = init(rotary.config, device, seq_len=length, layer_type=layer_type)
    if is_vllm:
        _check_scale(rotary.config, layer_type, scale)
    getattr(rotary, f"{prefix}inv_freq").copy_(inv_freq)
    # By its type transformers decides in each call whether to choose anew.
    if layer_type is None:
        rotary.rope_type = FIXED
    else:
        rotary.rope_type = {**rotary.rope_type, layer_type: FIXED}


def _check_scale(rope_config: Any, layer_type: str | None, scale: float) -> None:
    """Raise `UserError` if vLLM would scale attention differently: it ignores `factor` and
    `attention_factor`, and derives the scale from the two values below alone."""
    parameters = rope_config.rope_parameters
    if layer_type is not None:
        parameters = parameters[layer_type]
    original = parameters["original_max_position_embeddings"]
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
