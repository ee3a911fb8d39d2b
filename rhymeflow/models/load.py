"""Loads Hugging Face decoder-only models.

A loaded model attends through `models.attention`, is in eval mode and has no quantization config
(so it can be saved); its parameters have the names and shapes of the plain transformers model.
"""

from __future__ import annotations

import copy
import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.utils import logging

from rhymeflow.config import Config, ModelConfig
from rhymeflow.errors import UserError
from rhymeflow.models import attention, families
from rhymeflow.models.attention import Reach
from rhymeflow.models.buffers import buffers_of, keep_precision
from rhymeflow.models.converted import forget_quantization
from rhymeflow.models.precision import auto_dtype
from rhymeflow.models.source import Source, explained, locate, offline, readable, unreachable

_ARCHITECTURES = Path(__file__).parent / "architectures"

_TEXT_ALONE = {"gemma3": "Gemma3ForCausalLM", "gemma4": "Gemma4ForCausalLM"}
"""Types with parts for images, which transformers would load too: the class of the text model."""
TEXT_NAMES = {r"^language_model\.model\.": "model.", r"^model\.language_model\.": "model."}
"""How files of such types name the text model's parameters, and how that does."""
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.update(_TEXT_ALONE)

_CONVERTED = {"fp8", "mxfp4"}
"""Methods of quantization whose weights are converted to 16 or 32 bits."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the compute precision of `config` on `device`; `auto` depends on the model's size."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    return auto_dtype(count_parameters(load_config(config)), device)


def count_parameters(hf_config: PreTrainedConfig) -> int:
    """Return the number of parameters of such a model, tied ones counted once."""
    return sum(parameter.numel() for parameter in shapes_of(hf_config).parameters())


def shapes_of(hf_config: PreTrainedConfig) -> PreTrainedModel:
    """Create such a model without values, on the device `meta`."""
    with torch.device("meta"), no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(hf_config)
    model.tie_weights()
    return model


def load_config(config: ModelConfig) -> PreTrainedConfig:
    """Read the model's `config.json` (sizes, layers), without its weights. Raises `UserError` if
    there is none, or the model is not supported."""
    source = readable(config)
    with explained(source):
        fields, _ = PreTrainedConfig.get_config_dict(source.location, **offline(source))
        model_type = fields.get("model_type", "llama")  # without one transformers says so
    if model_type not in CONFIG_MAPPING:  # it may come with code, which is not run
        families.check(source.name, model_type)
    with explained(source):
        hf_config: PreTrainedConfig = AutoConfig.from_pretrained(source.location, **offline(source))
    _check_supported(source, hf_config)
    return hf_config


def check_native(config: ModelConfig, instead: str = families.USE_VLLM) -> None:
    """Raise `UserError` if the native engine does not run the model; reads its `config.json`."""
    families.check_native(config.name, load_config(config).to_dict(), instead)


def check_engine(config: Config) -> None:
    """Raise `UserError` if the run's engine does not run models of this type, whatever vLLM has."""
    check = families.check_native if config.rollout.engine == "native" else families.check_vllm
    check(config.model.name, load_config(config.model).to_dict())


def architecture(config: ModelConfig) -> PreTrainedConfig:
    """Do what `load_config` does, but without network for the recipes' models: their `config.json`,
    as published on the hub, is in `models/architectures`. Raises `UserError`."""
    shipped = _ARCHITECTURES / f"{config.name.replace('/', '--')}.json"
    if config.name.count("/") != 1 or not shipped.is_file() or Path(config.name).is_dir():
        return load_config(config)
    hf_config: PreTrainedConfig = AutoConfig.from_pretrained(shipped)
    _check_supported(locate(config), hf_config)
    return hf_config


def load_model(config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load the model with its weights. Raises `UserError` if it cannot be read or is not
    supported, or if weights are missing or not finite."""
    hf_config = load_config(config)
    is_text_alone = hf_config.model_type in _TEXT_ALONE
    quantization, source = _converting(hf_config), readable(config)
    if not sys.stderr.isatty():  # else transformers' bar fills a log
        logging.disable_progress_bar()
    with explained(source, "the weights"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.location,
            dtype=dtype,
            attn_implementation=attention.NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, in one line
            key_mapping=TEXT_NAMES if is_text_alone else None,
            quantization_config=quantization,
            **offline(source),
        )
    model: PreTrainedModel
    model, report = loaded
    if is_text_alone or quantization:  # it is saved as a text model, in 16 or 32 bits
        vars(model).pop("_weight_conversions", None)  # transformers 5.24 has done so itself
    _check_complete(source, model, report)
    for name, parameter in model.named_parameters():
        check_finite(source, name, parameter)
    forget_quantization(model)
    model.to(device).eval()  # type: ignore[arg-type]
    _unify(model, dtype)
    return model


def _unify(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give all parameters one precision; transformers keeps some types' routers in float32."""
    for each in model.parameters():
        each.data = each.data.to(dtype)


def _converting(hf_config: PreTrainedConfig) -> Any:
    """Return what has transformers convert quantized weights, which it keeps where there is a GPU
    for them; None if they are not quantized."""
    given = getattr(hf_config, "quantization_config", None)
    return given and AutoQuantizationConfig.from_dict({**given, "dequantize": True})


def empty_model(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Create the model with weights of NaN, which shows if they are used before the first pull;
    buffers that are not published (rotary frequencies) have their values."""
    model = unfilled_model(config, dtype=dtype, device=device)
    keep_precision(model)
    with torch.no_grad():
        for tensor in (*model.parameters(), *buffers_of(model).values()):
            tensor.fill_(torch.nan)
    return model


def unfilled_model(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Create the model with uninitialised parameters, which take no memory until written."""
    with no_init_weights():
        model = _initialised(config, dtype, device)
    _unify(model, dtype)
    model.tie_weights()
    forget_quantization(model)
    return model


def random_model(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, seed: int
) -> PreTrainedModel:
    """Create the model with random initial weights."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        return _initialised(config, dtype, device)


def small_model(config: ModelConfig, *, device: torch.device) -> PreTrainedModel:
    """Create a small model of the same type: few layers, of all kinds that it has, few tokens, thin
    MLPs, random weights."""
    hf_config = copy.deepcopy(load_config(config))
    text_config = hf_config.get_text_config()
    num_layers = text_config.num_hidden_layers
    first_shared = num_layers - (getattr(text_config, "num_kv_shared_layers", None) or 0)
    kinds = getattr(text_config, "layer_types", None) or [""] * num_layers
    layers = _of_each_kind([(kind, i >= first_shared) for i, kind in enumerate(kinds)])
    sizes = _sizes_of_layers(text_config, layers)
    for name, value in list(vars(text_config).items()):
        if isinstance(value, list) and len(value) == num_layers:
            setattr(text_config, name, [value[i] for i in layers])  # an entry per layer
        elif name.endswith(_MLP_SIZES) and isinstance(value, int):
            setattr(text_config, name, min(value, _THIN))
        elif name in _REACHES and isinstance(value, int):  # so that few tokens show its effect
            setattr(text_config, name, min(value, _NEAR))
        elif name in ("pad_token_id", "bos_token_id", "eos_token_id") and value is not None:
            setattr(text_config, name, 0)
    text_config.num_hidden_layers = len(layers)
    if first_shared < num_layers:
        text_config.num_kv_shared_layers = sum(i >= first_shared for i in layers)
    if sizes is not None:
        text_config.per_layer_config = sizes
    for name in ("vocab_size", "vocab_size_per_layer_input"):
        if (count := getattr(text_config, name, None)) is not None:
            setattr(text_config, name, min(count, _FEW_TOKENS))
    with explained(readable(config)), no_init_weights(), torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            hf_config, dtype=torch.float32, attn_implementation=attention.NAME
        )
    model.tie_weights()
    # All parameters repeat one pattern of prime length: drawing all numbers would take seconds.
    drawn = torch.randn(65_537, generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        for each in model.parameters():
            pattern = drawn.repeat(each.numel() // len(drawn) + 1)[: each.numel()].view(each.shape)
            each.copy_(pattern * each.shape[-1] ** -0.5 if each.ndim > 1 else pattern * 0.2 + 1.0)
    model.eval()
    return model


def _sizes_of_layers(text_config: Any, layers: list[int]) -> dict[int | str, dict[str, Any]] | None:
    """Return the sizes in which these layers of a model differ; None: they do not."""
    if not attention.is_mixed(text_config):
        return None
    own = [text_config.per_layer_config[i] for i in layers]
    names = text_config.per_layer_attributes
    return {i: {name: getattr(each, name) for name in names} for i, each in enumerate(own)}


def _of_each_kind(kinds: list[tuple[str, bool]]) -> list[int]:
    """Return the first layer of each kind, in order; at least the first layers. A layer's kind is
    how it attends, and whether to keys of another."""
    firsts = {kinds.index(kind) for kind in kinds}
    rest = (i for i in range(len(kinds)) if i not in firsts)
    return sorted([*firsts, *itertools.islice(rest, max(_FEW_LAYERS - len(firsts), 0))])


_FEW_LAYERS, _FEW_TOKENS, _THIN, _NEAR = 2, 256, 16, 4
_MLP_SIZES = ("intermediate_size", "ffn_hidden_size", "ffn_dim")
_REACHES = ("sliding_window", "attention_chunk_size")


def _initialised(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    hf_config = load_config(config)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            hf_config, dtype=dtype, attn_implementation=attention.NAME
        )
    model.generation_config = generation_config(readable(config)) or model.generation_config
    model.eval()
    return model


def generation_config(source: Source) -> GenerationConfig | None:
    """Read the model's `generation_config.json`; None if it has none."""
    if not source.is_hub and not (Path(source.location) / "generation_config.json").is_file():
        return None
    with explained(source):
        try:
            return GenerationConfig.from_pretrained(source.location, **offline(source))
        except OSError:
            if not source.is_hub:
                raise
    return None


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the end-of-sequence tokens of the generation config, the model and the tokenizer.
    Raises `UserError` if there are none, or one is outside the vocabulary."""
    return _stop_tokens(str(model.name_or_path), model.generation_config, model.config, tokenizer)


def check_end(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a response can end, and that a hub model's weights are available.

    Raises:
        UserError: no token ends a response, or the weights are not in the cache and the hub does
            not answer.
    """
    configured_stop_token_ids(config, tokenizer)
    source = readable(config)
    if source.is_hub and unreachable() is not None:
        with explained(source, "a file of the weights"):
            names = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
            paths = [try_to_load_from_cache(source.location, name) for name in names]
            if not any(isinstance(path, str) for path in paths):
                raise OSError("none is in the cache")


def configured_stop_token_ids(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """Do what `stop_token_ids` does, without loading the model."""
    generation = generation_config(readable(config))
    return _stop_tokens(config.name, generation, load_config(config), tokenizer)


def _stop_tokens(
    name: str,
    generation: GenerationConfig | None,
    hf_config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> frozenset[int]:
    candidates: tuple[Any, ...] = (
        getattr(generation, "eos_token_id", None),
        getattr(hf_config.get_text_config(), "eos_token_id", None),
        tokenizer.eos_token_id,
    )
    ids = frozenset(
        token
        for one_or_more in candidates
        if one_or_more is not None
        for token in (one_or_more if isinstance(one_or_more, list) else [one_or_more])
    )
    if not ids:
        raise UserError(
            f"model {name!r} names no end-of-sequence token (eos_token_id in its "
            "generation config, config or tokenizer), so a response could never end"
        )
    count = hf_config.get_text_config().vocab_size
    if max(ids) >= count:
        raise UserError(
            f"model {name!r}: its end-of-sequence token {max(ids)} (eos_token_id in its generation "
            f"config, config or tokenizer) is outside its vocabulary of {count} tokens"
        )
    return ids


def _check_complete(source: Source, model: PreTrainedModel, report: dict[str, Any]) -> None:
    """Raise `UserError` if files lack parameters, which transformers would fill at random, or have
    others in layers of the model, which it would leave out; whole parts may be left out."""
    missing, mismatched = sorted(report["missing_keys"]), sorted(report["mismatched_keys"])
    wrong = [f"has no {name}" for name in missing]
    wrong += [f"{name} is {list(found)}, not {list(due)}" for name, found, due in mismatched]
    modules = {name for name, _ in model.named_modules()}
    for name in sorted(report["unexpected_keys"]):
        parents = list(itertools.accumulate(name.split(".")[:-1], "{}.{}".format))
        is_in_layer = any(each in modules and each[-1].isdecimal() for each in parents)
        is_scale = name.endswith("_scale")  # of activations, in quantized files
        if (is_in_layer or (parents[-1:] and parents[-1] in modules)) and not is_scale:
            wrong.append(f"has {name}, for which there is no place")
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UserError(
            f"model.name = {source.name!r}: the weights do not fit its config.json: "
            f"{wrong[0]}{more}"
        )


def check_finite(source: Source, what: str, values: Tensor) -> None:
    """Raise `UserError` if some of the model's numbers are NaN or infinite; `what` names them."""
    if count := values.numel() - int(values.isfinite().sum()):
        raise UserError(
            f"model.name = {source.name!r}: {count:,} of the {values.numel():,} numbers of {what} "
            "are NaN or infinite"
        )


_NO_ENCODERS = {"gpt_neox", "gpt_neox_japanese"}
"""Types whose configurations say `is_decoder: false`, which their models ignore."""


def _check_supported(source: Source, hf_config: PreTrainedConfig) -> None:
    kind = f"model.name = {source.name!r}: a model of type {hf_config.model_type!r}"
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), None)
    try:
        text_config = hf_config.get_text_config()
    except ValueError:  # a composite of several models
        model_class, text_config = None, hf_config
    says_encoder = getattr(text_config, "is_decoder", True) is False
    is_encoder = says_encoder and text_config.model_type not in _NO_ENCODERS
    if model_class is None or is_encoder or getattr(text_config, "is_encoder_decoder", False):
        raise UserError(f"{kind} is not a decoder-only language model")
    kinds = set(getattr(text_config, "layer_types", None) or ["full_attention"])
    if families.FAMILIES.get(hf_config.model_type, families.ModelFamily()).state is not None:
        kinds -= families.STATE_KINDS | families.STATELESS_KINDS
    if kinds - _KINDS.keys():
        other = ", ".join(sorted(kinds - _KINDS.keys()))
        raise UserError(
            f"{kind} has {other}; only full, sliding and chunked attention is supported"
        )
    for layer_kind in kinds:
        name = _KINDS[layer_kind]
        if name and not getattr(text_config, name, None):
            raise UserError(f"{kind} has {layer_kind}, but no {name} in its config.json")
    if getattr(text_config, "attn_temperature_tuning", None):  # Llama 4
        raise UserError(
            f"{kind} scales queries by their place in a row of sequences (attn_temperature_tuning "
            "in its config.json), which is not supported"
        )
    quantization = getattr(hf_config, "quantization_config", None) or {}
    if quantization and (method := quantization.get("quant_method")) not in _CONVERTED:
        raise UserError(
            f"{kind} has weights that are quantized ({method}) and cannot be trained; "
            f"{' and '.join(sorted(_CONVERTED))} are converted, other models need 16 or 32 bits"
        )
    families.check(source.name, hf_config.model_type)
    _check_reaches(kind, text_config)


def _check_reaches(kind: str, text_config: PreTrainedConfig) -> None:
    """Raise `UserError` unless layers attend as far back as transformers has them: it reads the
    fields that its type has, vLLM and `Reach` any."""
    for name in _REACHES:
        if (reach := getattr(text_config, name, None)) and reach < 0:
            raise UserError(f"{kind} has {name} = {reach} in its config.json; at least 1 is needed")
    has, plain = type(text_config)(), copy.copy(text_config)
    strays = [name for name in _REACH_FIELDS if name in vars(plain) and not hasattr(has, name)]
    for name in strays:
        setattr(plain, name, None)
    layers = range(text_config.num_hidden_layers)
    if any(Reach.of(text_config, i) != Reach.of(plain, i) for i in layers):
        raise UserError(
            f"{kind} has {' and '.join(strays)} in its config.json, which models of this type do "
            "not use; take it out"
        )


_REACH_FIELDS = (*_REACHES, "use_sliding_window", "layer_types")
"""What `Reach` is read from."""
_KINDS = {
    "full_attention": None,
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
"""Supported kinds of `layer_types`, and the option that says how far they reach."""
