"""A small random model of each type that the loader accepts, in groups.

A case's name begins with its type. Its fields are those of `SIZES` that its configuration has, and
its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rhymeflow.models import attention
from rhymeflow.models.buffers import buffers_of
from rhymeflow.models.load import TEXT_NAMES
from tests.engine.models import VOCABULARY

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 320, "initializer_range": 0.2, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": None,
    "use_sliding_window": False, "layer_types": None, "mlp_layer_types": None,
    # Older names
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 320, "n_inner": 48, "ffn_dim": 48,
    "word_embed_proj_dim": 32, "kv_channels": 16,
    # Experts
    "num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4, "n_routed_experts": 4,
    "moe_num_experts": 4, "moe_k": 2, "moe_topk": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24, "n_shared_experts": 1, "num_shared_experts": 1,
    "moe_num_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "shared_intermediate_size": 24, "decoder_sparse_step": 1, "dense_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 24, "num_dense_layers": 1,
    # Latent attention
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    # The gated delta rule
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_head_dim": 8,
    "linear_num_heads": 4,
    # State spaces
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8,
    "mamba_expand": 2, "mamba_chunk_size": 8, "mamba_d_ssm": 64, "mamba_dt_rank": 4,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2,
    "chunk_size": 8,
}  # fmt: skip

NEAR = {"sliding_window": 4}
QWEN = {**NEAR, "use_sliding_window": True, "max_window_layers": 1}
MIXED = {**NEAR, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA = {**MIXED, "query_pre_attn_scalar": 16}
CAPPED = {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
FOUR = {"num_key_value_heads": 4}
KINDS = ["linear_attention", "full_attention"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 80}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
VISION = {
    **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4},
    **{"out_hidden_size": 32, "num_position_embeddings": 16},
    **{"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8},
}


_SINCE = {
    **dict.fromkeys(("internlm3", "iquestcoder"), "5.20"),
    **dict.fromkeys(("exaone", "sarvam_mla", "sarvam_moe"), "5.24"),
}

NEWER = {x for x, since in _SINCE.items() if Version(since) > Version(transformers.__version__)}
"""Types that this version of transformers does not have yet."""


def _plain(types: str) -> dict[str, dict[str, Any]]:
    return {name: {} for name in types.split()}


DENSE: dict[str, dict[str, Any]] = {
    **_plain("apertus arcee ernie4_5 exaone gemma glm glm4 hunyuan_v1_dense internlm3"),
    **_plain("iquestcoder jais2 llama ministral3 nemotron olmo olmo2 phi qwen2 qwen3 seed_oss"),
    "helium": {"head_dim": 8},
    "llama yarn": {"rope_parameters": {"rope_theta": 1e4, **YARN}},
    "llama llama3": {"rope_parameters": {"rope_theta": 1e4, **LLAMA3}},
    "llama biases": {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    "qwen2 tied": {"tie_word_embeddings": True},
}
"""Attention and MLPs, as in Llama."""

WINDOWS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("ministral", "mistral", "mixtral", "phi3", "phimoe", "starcoder2"), NEAR),
    **dict.fromkeys(("exaone4", "olmo3"), MIXED),
    "cohere2": {**MIXED, "logit_scale": 0.0625},
    "gemma2": CAPPED,
    "gemma3": {**GEMMA, "tie_word_embeddings": True},  # with a part for images
    "gemma3_text": GEMMA,
    "gemma4": {  # with a part for images
        **MIXED, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": True,
    },
    "gemma4_text": {
        **NEAR, "layer_types": MIXED["layer_types"] * 2, "num_hidden_layers": 4,
        "num_kv_shared_layers": 2, "global_head_dim": 32, "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
        "final_logit_softcapping": 3.0,
    },
    "gpt_oss": MIXED,
    "granite_swa": {**MIXED, "logits_scaling": 8.0},
    "llama4_text": {
        "attention_chunk_size": 4, "no_rope_layers": [1, 0], "attn_temperature_tuning": False,
        "intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 1,
    },
    "qwen2 windows": QWEN,
    "qwen2_moe": QWEN,
    "smollm3": {**NEAR, "use_sliding_window": True, "no_rope_layers": [1, 0]},
    "vaultgemma": CAPPED,
}  # fmt: skip
"""Windows or chunks in every layer or in some, sinks, capped scores, layers without positions."""

OTHER: dict[str, dict[str, Any]] = {
    "bitnet": {},
    "cohere": {"logit_scale": 0.3},
    "gpt2": {},
    "gpt2 scaled by layer": {"scale_attn_by_inverse_layer_idx": True},
    "gpt_bigcode": {"multi_query": True, "num_key_value_heads": 1},
    "gpt_neox": {},
    "granite": {"logits_scaling": 2.0, "residual_multiplier": 0.7, "embedding_multiplier": 3.0},
    "hyperclovax": {"logits_scaling": 0.5},
    "nanochat": {"final_logit_softcapping": 3.0},
    "opt": {},
    "persimmon": {},
    "axk1": FOUR,
    "deepseek_v2": {**FOUR, "topk_method": "greedy"},
    "deepseek_v3": FOUR,
    "deepseek_v3 narrow values": {**FOUR, "v_head_dim": 12},
    "diffllama": {},
    "glm4_moe_lite": FOUR,
    "jetmoe": {},
    "minicpm3": FOUR,
    "sarvam_mla": FOUR,
    "youtu": FOUR,
}
"""Other attention, scaled or capped logits, other layers."""

EXPERTS = {
    **_plain("aria_text ernie4_5_moe flex_olmo glm4_moe granitemoe granitemoeshared"),
    **_plain("hunyuan_v1_moe hy_v3 minimax_m2 minimax_m3_vl_text olmoe qwen3_moe sarvam_moe"),
    **_plain("solar_open"),
}
"""Mixtures of experts."""

STATES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"lm_head_multiplier": 0.5, "attention_out_multiplier": 0.8},
    "granitemoehybrid": {"layer_types": KINDS, "logits_scaling": 2.0},
    "granitemoehybrid attention alone": {"layer_types": ["full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**FOUR, "num_experts_per_token": 2, "layer_types": KINDS},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "olmo_hybrid": {"layer_types": KINDS},
    "qwen3_5": {"layer_types": KINDS},  # with a part for images
    "qwen3_5_moe": {"layer_types": KINDS},
    "qwen3_5_moe_text": {"layer_types": KINDS},
    "qwen3_5_text": {"layer_types": KINDS},
    "qwen3_next": {"layer_types": KINDS},
}
"""Linear attention, state spaces and convolutions, and attention."""

GROUPS = (DENSE, WINDOWS, OTHER, EXPERTS, STATES)
for _group in GROUPS:
    for _name in NEWER & _group.keys():
        del _group[_name]


def config_of(name: str, **more: Any) -> PreTrainedConfig:
    """The configuration of a case, or of a type without one; `more` are fields that differ."""
    own = next((group[name] for group in GROUPS if name in group), {})
    whole = CONFIG_MAPPING[name.split()[0]]
    default = whole()
    text = default.get_text_config()
    text.allow_global_per_layer_attribute_access = True  # Gemma 4's layers differ in sizes
    fields = {key: x for key, x in SIZES.items() if _has(text, key)}
    if "qk_rope_head_dim" in fields:
        fields.pop("head_dim", None)  # it is that of the part with positions
    fields |= own | more
    return (
        whole(text_config=fields, vision_config=VISION) if text is not default else whole(**fields)
    )


def _has(config: PreTrainedConfig, key: str) -> bool:
    """Whether it is a field, and neither another's name nor derived from others."""
    is_derived = isinstance(getattr(type(config), key, None), property)
    return hasattr(config, key) and key not in config.attribute_map and not is_derived


def save(name: str, directory: Path, **more: Any) -> None:
    """Save the model of a case, with a part for images if its type has one."""
    config = config_of(name, **more)
    is_text = config.get_text_config() is config
    kind: Any = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
    _made(kind, config, torch.float32, "eager").save_pretrained(directory)


def model_of(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> PreTrainedModel:
    """The same, as engine and learner have it."""
    return _made(AutoModelForCausalLM, config_of(name, **more), dtype, attention.NAME).eval()


def _made(kind: Any, config: PreTrainedConfig, dtype: torch.dtype, how: str) -> PreTrainedModel:
    """Norms, biases and sinks are not what they are initialised to."""
    torch.manual_seed(0)
    model: PreTrainedModel = kind.from_config(config, dtype=dtype, attn_implementation=how)
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, each in (*model.named_parameters(), *buffers_of(model).items()):
            scale = 1.0 if name.endswith("sinks") else 0.05 if each.ndim > 1 else 0.2
            each += (torch.randn(each.shape, generator=drawn) * scale).to(each.dtype)
    return model


def eager(directory: Path) -> PreTrainedModel:
    """The saved model as transformers computes it."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", key_mapping=TEXT_NAMES
    )
    return model.eval()
