"""The directory of an adapter in peft's format: `adapter_config.json`, `adapter_model.safetensors`.

Both are read and written here without peft, of which the tests use the original to compare.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rhymeflow.config import LoraConfig, ModelConfig
from rhymeflow.errors import UserError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ALL_LINEAR = "all-linear"

_READ = frozenset(("r", "lora_alpha", "use_rslora", "target_modules", "modules_to_save"))
_WITHOUT_EFFECT = frozenset(
    (
        *("peft_type", "task_type", "base_model_name_or_path", "revision", "auto_mapping", "bias"),
        *("inference_mode", "peft_version", "lora_dropout", "init_lora_weights", "runtime_config"),
        *("megatron_core", "qalora_group_size", "ensure_weight_tying"),
    )
)
"""Fields of peft that say nothing of what a trained adapter computes; dropout is of its training,
and `bias` is looked at."""


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
    if is_adapter(named := Path(config.name).expanduser()):
        return read(named, "model.name")
    lora = config.lora
    if lora.adapter is not None:
        return read(Path(lora.adapter).expanduser(), "model.lora.adapter")
    return adapter_of(lora) if lora.is_used else None


def adapter_of(lora: LoraConfig) -> Adapter:
    """Return a new adapter with these sizes."""
    alpha = 2.0 * lora.rank if lora.alpha is None else lora.alpha
    return Adapter(
        lora.rank, alpha, lora.use_rslora, tuple(lora.target_modules), tuple(lora.modules_to_save)
    )


def base_of(directory: Path) -> str:
    """Return the name of the model that an adapter belongs to. Raises `UserError` if there is
    none."""
    name = _fields(directory, "model.name").get("base_model_name_or_path")
    if not name:
        raise UserError(
            f"model.name = '{directory}': {CONFIG} names no base_model_name_or_path; give the "
            "model as model.name, and the adapter as model.lora.adapter"
        )
    return str(name)


def read(directory: Path, where: str) -> Adapter:
    """Read an adapter's configuration. Raises `UserError` as `adapter_for` does."""
    fields = _fields(directory, where)
    for name, value in fields.items():
        if name not in _READ | _WITHOUT_EFFECT and value:
            raise _unsupported(directory, where, name, value)
    kind, bias, targets = fields.get("peft_type"), fields.get("bias"), fields.get("target_modules")
    if kind != "LORA":
        raise _unsupported(directory, where, "peft_type", kind)
    if bias not in (None, "none"):
        raise _unsupported(directory, where, "bias", bias)
    if targets == ALL_LINEAR:
        targets = [ALL_LINEAR]
    if not isinstance(targets, list) or not targets:
        raise _unsupported(directory, where, "target_modules", targets)
    try:
        rank, alpha = int(fields["r"]), float(fields["lora_alpha"])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{where} = '{directory}': {CONFIG} has no r or no lora_alpha") from None
    saved = tuple(sorted(fields.get("modules_to_save") or ()))
    is_rslora = bool(fields.get("use_rslora"))
    return Adapter(rank, alpha, is_rslora, tuple(sorted(targets)), saved, directory)


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
    }


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
