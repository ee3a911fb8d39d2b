"""Tiny random models of types that attend or make logits in another way than Llama."""

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rhymeflow.models import attention

SIZES = {
    "vocab_size": 150, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT = {"num_key_value_heads": None, "head_dim": None}
"""They have as many heads of keys as of queries, and do not say how wide."""
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    **{"moe_intermediate_size": 16},
}
LATENT = {
    **{"num_key_value_heads": 4, "head_dim": None, "q_lora_rank": 12, "kv_lora_rank": 8},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
}
"""Keys of 24 numbers, values of 16."""
NEAR = {"sliding_window": 4}
QWEN = {**NEAR, "use_sliding_window": True, "max_window_layers": 1}
MIXED = {**NEAR, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA = {**MIXED, "query_pre_attn_scalar": 16}
CAPPED = {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}

TYPES = {
    "llama": {},
    "qwen3": {},
    # Logits are scaled or capped.
    "cohere": {"logit_scale": 0.0625},
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "granitemoe": {"logits_scaling": 8.0, **EXPERTS},
    "hyperclovax": {"logits_scaling": 0.2},
    "nanochat": {"final_logit_softcapping": 3.0},
    "bitnet": {"head_dim": None},
    # Without `num_key_value_heads`.
    "gpt2": {**GPT, "n_inner": 48},
    "gpt_neox": GPT,
    "opt": {**GPT, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_bigcode": {**GPT, "multi_query": True},
    # Windows in every layer or in some, chunks, sinks, capped scores, layers without positions.
    "mistral": NEAR,
    "mixtral": {**NEAR, **EXPERTS},
    "ministral": NEAR,
    "phi3": NEAR,
    "phimoe": {**NEAR, **EXPERTS},
    "starcoder2": NEAR,
    "qwen2": QWEN,
    "qwen2_moe": {
        **QWEN, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "smollm3": {**NEAR, "use_sliding_window": True, "no_rope_layers": [1, 0]},
    "olmo3": MIXED,
    "exaone4": MIXED,
    "cohere2": {**MIXED, "logit_scale": 0.0625},
    "gemma2": CAPPED,
    "vaultgemma": CAPPED,
    "gemma3_text": GEMMA,
    "gpt_oss": {**MIXED, **EXPERTS},
    "granite_swa": {**MIXED, "logits_scaling": 8.0},
    "llama4_text": {
        "attention_chunk_size": 4, "no_rope_layers": [1, 0], "attn_temperature_tuning": False,
        "intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 1,
    },
    # Latent attention.
    "deepseek_v2": {**LATENT, **ROUTED, "first_k_dense_replace": 1},
    "deepseek_v3": {**LATENT, **ROUTED, "first_k_dense_replace": 1},
    "glm4_moe_lite": {**LATENT, **ROUTED},
    "minicpm3": LATENT,
    "youtu": LATENT,
    "axk1": {**LATENT, **ROUTED},
}  # fmt: skip


def model_of(kind, dtype=torch.float32, **more):
    """A model whose norms, biases and sinks are not what they are initialised to."""
    fields = {name: x for name, x in {**SIZES, **more}.items() if x is not None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[kind](**fields), dtype=dtype, attn_implementation=attention.NAME
    )
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, each in model.named_parameters():
            scale = 1.0 if name.endswith("sinks") else 0.1
            each += scale * torch.randn(each.shape, generator=drawn).to(dtype)
    return model.eval()
