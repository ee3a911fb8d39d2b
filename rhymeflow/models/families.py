"""The types of models that are supported: exactly those that tests compare with transformers.

Each type of the table has a case in `tests/families`: a small random model, whose log-probabilities
in engine and learner, and gradients, are those of transformers' eager code. Any other type is
refused by its name before anything is loaded. Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rhymeflow.errors import UserError


class ModelFamily(NamedTuple):
    """What is known about a type of models."""

    state: str | None = None
    """Class of those of its modules that carry a state from token to token; None: it has none."""
    not_called: str | None = None
    """End of the names of layers whose weights its code uses without calling them: an adapter there
    would have no effect."""
    not_native: str | None = None
    """Why the native engine does not run it; None: it does, unless layers carry a state."""
    not_vllm: str | None = None
    """Why vLLM is not given its weights; None: it is, if it has the type."""


_LATENT = "has latent attention, for which vLLM derives other weights"

FAMILIES: dict[str, ModelFamily] = {
    **dict.fromkeys(
        (
            *("apertus", "arcee", "aria_text", "bitnet", "cohere", "ernie4_5", "ernie4_5_moe"),
            *("exaone", "exaone4", "flex_olmo", "gemma", "glm", "glm4", "glm4_moe", "gpt2"),
            *("gpt_bigcode", "gpt_neox", "granite", "granitemoe", "granitemoeshared", "helium"),
            *("hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3"),
            *("iquestcoder", "jais2", "llama", "minimax_m2", "minimax_m3_vl_text", "ministral3"),
            *("mistral", "mixtral", "nanochat", "nemotron", "olmo", "olmo2", "olmoe", "opt"),
            *("persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
            *("sarvam_moe", "seed_oss", "smollm3", "solar_open", "starcoder2"),
            # Windows, chunks, sinks, capped scores
            *("cohere2", "gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text"),
            *("granite_swa", "llama4_text", "ministral", "olmo3", "vaultgemma"),
            *("minicpm3", "youtu"),  # latent attention
        ),
        ModelFamily(),
    ),
    **dict.fromkeys(
        ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "sarvam_mla"),
        ModelFamily(not_vllm=_LATENT),
    ),
    "diffllama": ModelFamily(not_native="attends more than once in a layer"),
    "gpt_oss": ModelFamily(not_vllm="has experts whose weights vLLM transposes"),
    "jetmoe": ModelFamily(not_native="has experts of attention"),
    # Linear attention (gated delta rule)
    "kimi_linear": ModelFamily("KimiLinearDeltaAttention", not_vllm=_LATENT),
    "olmo_hybrid": ModelFamily("OlmoHybridGatedDeltaNet"),
    "qwen3_5": ModelFamily("Qwen3_5GatedDeltaNet"),
    "qwen3_5_moe": ModelFamily("Qwen3_5MoeGatedDeltaNet"),
    "qwen3_5_moe_text": ModelFamily("Qwen3_5MoeGatedDeltaNet"),
    "qwen3_5_text": ModelFamily("Qwen3_5GatedDeltaNet"),
    "qwen3_next": ModelFamily("Qwen3NextGatedDeltaNet"),
    # State spaces (Mamba)
    "bamba": ModelFamily("BambaMixer"),
    "falcon_h1": ModelFamily("FalconH1Mixer"),
    "granitemoehybrid": ModelFamily("GraniteMoeHybridMambaLayer"),
    "jamba": ModelFamily("JambaMambaMixer", "dt_proj"),
    "nemotron_h": ModelFamily("NemotronHMamba2Mixer"),
    # Short convolutions
    "lfm2": ModelFamily("Lfm2ShortConv"),
    "lfm2_moe": ModelFamily("Lfm2MoeShortConv"),
}
"""By the `model_type` of a model's `config.json`."""

STATE_KINDS = {"linear_attention", "conv", "hybrid", "mamba"}
"""Kinds of layers that carry a state, by transformers' names; `mamba` is in older files."""
NOT_ATTENDING = {"linear_attention", "conv", "mamba", "mlp", "moe"}
"""Kinds of layers without keys and values."""
STATELESS_KINDS = {"full_attention", "attention", "mlp", "moe"}
"""Kinds of the other layers of such models; some do not attend."""


def check(name: str, model_type: str) -> None:
    """Raise `UserError` if the model called `name` is of a type that is not supported."""
    if model_type not in FAMILIES:
        raise UserError(
            f"model.name = {name!r}: models of type {model_type!r} are not supported, since none "
            "was compared with transformers; docs/models.md names those that are"
        )


USE_VLLM = "set rollout.engine = 'vllm'"


def check_native(name: str, fields: Mapping[str, Any], instead: str = USE_VLLM) -> None:
    """Raise `UserError` if the native engine does not run the model called `name`, whose
    `config.json` has these fields; `instead` says what does."""
    model_type, has_state = fields["model_type"], carries_state(fields)
    reason = _STATE if has_state else FAMILIES[model_type].not_native
    if reason is None:
        return
    if (not_vllm := FAMILIES[model_type].not_vllm) is not None:
        instead = f"nor does vLLM run it, as it {not_vllm}; {_SFT}"
    raise UserError(
        f"model.name = {name!r}: a model of type {model_type!r} {reason}, which the native "
        f"engine does not support; {instead}"
    )


def check_vllm(name: str, fields: Mapping[str, Any]) -> None:
    """Do the same for vLLM; what it has and what not, it is asked itself."""
    model_type = fields["model_type"]
    if (reason := FAMILIES[model_type].not_vllm) is not None:
        instead = _SFT if carries_state(fields) else "set rollout.engine = 'native'"
        raise UserError(
            f"model.name = {name!r}: a model of type {model_type!r} {reason}, so it is not run by "
            f"vLLM; {instead}"
        )


_STATE = "has layers that carry a state from token to token"
_SFT = "`rhymeflow sft` alone trains it"


def carries_state(fields: Mapping[str, Any]) -> bool:
    """Return whether a layer of the model with these fields of `config.json` carries a state."""
    if FAMILIES.get(fields["model_type"], ModelFamily()).state is None:
        return False
    text_fields = fields.get("text_config") or fields
    kinds = text_fields.get("layer_types") or text_fields.get("layers_block_type")
    return kinds is None or not STATE_KINDS.isdisjoint(kinds)
