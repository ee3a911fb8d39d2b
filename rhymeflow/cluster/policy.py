"""The policy of a run on GPUs, by its shapes; and which policies cannot be trained as configured.

Holds true: no weights are read, no network is asked for models that recipes name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rhymeflow.config import Config
from rhymeflow.errors import UserError
from rhymeflow.models.load import architecture
from rhymeflow.sizes import Model, model_of


@dataclass(frozen=True)
class Policy:
    """What of a model decides where it fits."""

    model: Model
    hidden_size: int
    num_heads: int
    num_experts: int
    """Of each layer; 0: it is dense."""

    @property
    def weights(self) -> int:
        """Bytes of all weights, as they are computed with."""
        return self.model.num_parameters * self.model.bytes_per_value

    @property
    def kv_token(self) -> int:
        """Bytes of one token in the KV cache, over all GPUs of an instance."""
        model = self.model
        return 2 * model.num_layers * model.num_kv_heads * model.head_size * model.bytes_per_value


def policy_of(config: Config) -> Policy:
    """The policy, on GPUs, where `model.dtype: auto` is bfloat16.

    Raises:
        UserError: there is no such model; or it cannot be trained as configured.
    """
    hf_config = architecture(config.model)
    text = hf_config.get_text_config()
    dtype = torch.float32 if config.model.dtype == "float32" else torch.bfloat16
    found = Policy(
        model_of(hf_config, dtype, "cuda"),
        text.hidden_size,
        text.num_attention_heads,
        getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0,
    )
    _check(config, found)
    return found


def _check(config: Config, policy: Policy) -> None:
    rollout = config.rollout
    parts = rollout.vllm_tensor_parallel_size
    if policy.num_heads % parts or policy.model.num_kv_heads % parts:
        raise UserError(
            f"rollout.vllm_tensor_parallel_size = {parts} does not divide the "
            f"{policy.num_heads} attention heads and {policy.model.num_kv_heads} KV heads of "
            f"{config.model.name}"
        )
