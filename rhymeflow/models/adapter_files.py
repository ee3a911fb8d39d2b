"""The directory of an adapter in peft's format: `adapter_config.json`, `adapter_model.safetensors`.

Both are read and written here without peft, of which the tests use the original to compare.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rhymeflow.config import LoraConfig, ModelConfig
from rhymeflow.errors import UserError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ALL_LINEAR = "all-linear"

_READ = frozenset(
    ("r", "lora_alpha", "use_rslora", "target_modules", "modules_to_save", "quantization")
)
_WITHOUT_EFFECT = frozenset(
    (
        *("peft_type", "task_type", "base_model_name_or_path", "revision", "auto_mapping", "bias"),
        *("inference_mode", "peft_version", "lora_dropout", "init_lora_weights", "runtime_config"),
        *("megatron_core", "qalora_group_size", "ensure_weight_tying"),
    )
)
"""Fields of peft that say nothing of what a trained adapter computes; dropout is of its training,
and `bias` and `init_lora_weights` are looked at."""
_KEEPS_BASE = (None, True, False, "gaussian", "orthogonal", "eva", "mica")
"""Initial values for which peft leaves the model as it is. Others, such as `pissa`, it subtracts
from the model's weights, also when it loads a trained adapter."""


@dataclass(frozen=True)
class Adapter:
    """The shape of an adapter, and where its values are."""

    rank: int
    alpha: float
    use_rslora: bool
    target_modules: tuple[str, ...]
    """Ends of the layers' names; or `all-linear` alone."""
    modules_to_save: tuple[str, ...]
    directory: Path | None = None
    """Where the values are; None: a new adapter, which changes nothing yet."""
    quantization: str | None = None
    """`model.quantization` of the weights under it."""

    @property
    def scale(self) -> float:
        """By what the adapter's product is multiplied."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


def is_adapter(directory: Path) -> bool:
    """Whether it holds an adapter and no model."""
    return (directory / CONFIG).is_file() and not (directory / "config.json").is_file()


def check_trained(config: ModelConfig) -> None:
    """Raise `UserError` if the model to train is given as an adapter of it."""
    if is_adapter(Path(config.name).expanduser()):
        raise UserError(
            f"model.name = {config.name!r}: is an adapter; to train it further, give its model as "
            "model.name, and it as model.lora.adapter"
        )


def adapter_for(config: ModelConfig) -> Adapter | None:
    """Return the adapter of the model: the one that `name` is a directory of, or that of `lora`;
    None: there is none. Raises `UserError` if it cannot be read, or is of an unknown kind."""
    lora = config.lora
    if is_adapter(named := Path(config.name).expanduser()):
        if lora.is_used:
            raise UserError(f"model.lora: model.name = {config.name!r} is an adapter already")
        return read(named, "model.name")
    if lora.adapter is not None:
        given = read(Path(lora.adapter).expanduser(), "model.lora.adapter")
        if given.quantization and not config.quantization:
            raise UserError(
                f"model.lora.adapter = {lora.adapter!r}: was trained on weights of "
                f"model.quantization = {given.quantization!r}; give that too"
            )
        return replace(given, quantization=config.quantization)
    if not lora.is_used:
        return None
    return replace(adapter_of(lora), quantization=config.quantization)


def adapter_of(lora: LoraConfig) -> Adapter:
    """Return a new adapter with these sizes."""
    alpha = 2.0 * lora.rank if lora.alpha is None else lora.alpha
    return Adapter(
        lora.rank, alpha, lora.use_rslora, tuple(lora.target_modules), tuple(lora.modules_to_save)
    )


def base_of(directory: Path) -> str:
    """Return the name of the model that an adapter belongs to. Raises `UserError` if there is
    none."""
    name = named_base(directory, "model.name")
    if name is None:
        raise UserError(
            f"model.name = '{directory}': {CONFIG} names no base_model_name_or_path; give the "
            "model as model.name, and the adapter as model.lora.adapter"
        )
    return name


def named_base(directory: Path, where: str) -> str | None:
    """Return the name of the model that an adapter belongs to, if its files have one. Raises
    `UserError` if they cannot be read; `where` names the field."""
    name = _fields(directory, where).get("base_model_name_or_path")
    return str(name) if name else None


def lost_dropout(config: ModelConfig) -> str | None:
    """Return a sentence if the adapter to start from was trained with dropout, None if not."""
    if config.lora.adapter is None:
        return None
    fields = _fields(Path(config.lora.adapter).expanduser(), "model.lora.adapter")
    if not (rate := fields.get("lora_dropout")):
        return None
    where = f"model.lora.adapter = {config.lora.adapter!r}"
    return f"{where}: its lora_dropout = {rate} is not continued: there is no dropout in training"


def read(directory: Path, where: str) -> Adapter:
    """Read an adapter's configuration. Raises `UserError` as `adapter_for` does."""
    fields = _fields(directory, where)
    for name, value in fields.items():
        if name not in _READ | _WITHOUT_EFFECT and value:
            raise _unsupported(directory, where, name, value)
    targets, saved = fields.get("target_modules"), fields.get("modules_to_save") or []
    if targets == ALL_LINEAR:
        targets = [ALL_LINEAR]
    supported = {
        "peft_type": fields.get("peft_type") == "LORA",
        "bias": fields.get("bias") in (None, "none"),
        "init_lora_weights": fields.get("init_lora_weights") in _KEEPS_BASE,
        "target_modules": bool(targets) and _are_names(targets),
        "modules_to_save": _are_names(saved),
        "quantization": fields.get("quantization") in (None, "nf4"),
    }
    for name, is_supported in supported.items():
        if not is_supported:
            raise _unsupported(directory, where, name, fields.get(name))
    try:
        rank, alpha = int(fields["r"]), float(fields["lora_alpha"])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{where} = '{directory}': {CONFIG} has no r or no lora_alpha") from None
    if rank < 1 or not 0 < alpha < math.inf:
        sizes = f"r = {rank} and lora_alpha = {alpha:g}"
        raise UserError(f"{where} = '{directory}': {CONFIG} has {sizes}; both are above 0")
    is_rslora = bool(fields.get("use_rslora"))
    named, whole = (tuple(sorted(map(str, each or ()))) for each in (targets, saved))
    quantization = fields.get("quantization")
    return Adapter(rank, alpha, is_rslora, named, whole, directory, quantization)


def as_fields(adapter: Adapter, base: str) -> Mapping[str, Any]:
    """Return what `adapter_config.json` says of an adapter of the model `base`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,
        "use_rslora": adapter.use_rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(adapter.target_modules),
        "modules_to_save": list(adapter.modules_to_save) or None,
        **({"quantization": adapter.quantization} if adapter.quantization else {}),
    }


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _fields(directory: Path, where: str) -> dict[str, Any]:
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            raise UserError(f"{where} = '{directory}': holds no adapter: {name} is missing")
    try:
        fields = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{where} = '{directory}': {CONFIG} cannot be read: {error}") from None
    if not isinstance(fields, dict):
        raise UserError(f"{where} = '{directory}': {CONFIG} is not a mapping")
    return fields


def _unsupported(directory: Path, where: str, name: str, value: object) -> UserError:
    return UserError(f"{where} = '{directory}': {name} = {value!r} in {CONFIG} is not supported")
