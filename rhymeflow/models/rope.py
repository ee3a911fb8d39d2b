"""LongRoPE's factors, chosen once for a run.

transformers takes the long ones for a whole call if one of its positions is beyond the length that
the model was first trained with, so a response would depend on what is computed beside it (law 3).
Here the greatest length that the run can have decides, as in vLLM.
"""

from __future__ import annotations

import math
from typing import Any

from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rhymeflow.config import Config
from rhymeflow.errors import UserError


def settled(model: PreTrainedModel, config: Config) -> PreTrainedModel:
    """The model, for prompts and responses of `config`.

    Raises:
        UserError: vLLM would scale attention otherwise.
    """
    length = _longest(config, model.config.get_text_config().max_position_embeddings)
    for module in model.modules():
        if getattr(module, "rope_type", None) == "longrope":
            rotary: Any = module
            make = ROPE_INIT_FUNCTIONS["longrope"]
            found, scale = make(rotary.config, rotary.inv_freq.device, seq_len=length)
            if config.rollout.engine == "vllm":
                _check_scale(rotary.config, scale)
            # The two that transformers chooses from in each call.
            rotary.original_inv_freq = rotary.long_inv_freq = found
    return model


def _check_scale(text: Any, scale: float) -> None:
    """Raise `UserError` if vLLM, which computes it from the two lengths alone, finds another."""
    first = text.rope_parameters["original_max_position_embeddings"]
    times = max(text.max_position_embeddings / first, 1.0)
    of_vllm = math.sqrt(1.0 + math.log(times) / math.log(first))
    if abs(scale - of_vllm) > 1e-4:
        raise UserError(
            f"rollout.engine = 'vllm': the model's config.json has LongRoPE scale attention by "
            f"{scale:.4f} (factor or attention_factor), vLLM would by {of_vllm:.4f}; use 'native'"
        )


def _longest(config: Config, context: int) -> int:
    """Most tokens that a prompt and its response can have together."""
    rollout, prompt = config.rollout, config.data.max_prompt_length
    if rollout.engine == "vllm":  # which looks at nothing else
        return min(rollout.vllm_max_model_length or context, context)
    if prompt is None:
        return context
    responses = [rollout.max_completion_length]
    responses += [suite.max_completion_length or 0 for suite in config.eval.suites]
    return min(prompt + max(responses), context)
