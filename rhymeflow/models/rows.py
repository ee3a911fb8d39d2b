"""Reads parts of a model's weights from its files, so that no process holds the whole model.

For the few families whose files have other parameter names than the model, it is loaded whole."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from rhymeflow.config import ModelConfig
from rhymeflow.models.buffers import buffers_of, keep_precision, published_buffers
from rhymeflow.models.load import check_finite, load_config, load_model, unfilled_model
from rhymeflow.models.source import Source, explained, offline, readable

_CPU = torch.device("cpu")


class WeightRows:
    """Reads rows of the parameters of `config`'s model, in `dtype`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32) -> None:
        self._config, self._dtype = config, dtype
        self._source = readable(config)
        with explained(self._source, "the weights"):
            self._files = _files(_directory(self._source))
        self._whole: dict[str, Tensor] | None = None
        if not self._fits():
            model = load_model(config, dtype=dtype, device=_CPU)
            self._whole = {name: each.detach() for name, each in model.named_parameters()}
            self._whole |= published_buffers(model, dtype)

    def _fits(self) -> bool:
        """Return whether the files have the model's parameters by its names; read only headers."""
        if getattr(load_config(self._config), "quantization_config", None) is not None:
            return False
        model = self._unfilled(torch.float32)
        for name, tensor in (*model.named_parameters(), *buffers_of(model).items()):
            if name not in self._files:
                return False
            with safe_open(self._files[name], "pt") as file:
                if tuple(file.get_slice(name).get_shape()) != tuple(tensor.shape):
                    return False  # `load_model` raises
        return True

    def skeleton(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """Create the model with uninitialised parameters; see `unfilled_model`."""
        model = self._unfilled(dtype)
        keep_precision(model)
        for name, each in published_buffers(model, dtype).items():
            each.copy_(self.read(name, slice(0, len(each)), torch.float32))
        return model

    def _unfilled(self, dtype: torch.dtype) -> PreTrainedModel:
        return unfilled_model(self._config, dtype=dtype, device=_CPU)

    def read(self, name: str, rows: slice, dtype: torch.dtype | None = None) -> Tensor:
        """Return rows of a parameter or buffer, by its name in the model. Raises `UserError` if
        some are NaN or infinite."""
        if self._whole is not None:
            return self._whole[name][rows]
        with explained(self._source, "the weights"), safe_open(self._files[name], "pt") as file:
            stored = file.get_slice(name)
            is_number = not stored.get_shape()  # of which no slice can be taken
            numbers: Tensor = (file.get_tensor(name)[None] if is_number else stored)[rows]
            values = numbers.to(dtype or self._dtype)
        check_finite(self._source, f"rows {rows.start:,} to {rows.stop:,} of {name}", values)
        return values


def _directory(source: Source) -> Path:
    if not source.is_hub:
        return Path(source.location)
    patterns = ["*.safetensors", "*.json"]
    return Path(snapshot_download(source.location, allow_patterns=patterns, **offline(source)))


def _files(directory: Path) -> dict[str, Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: directory / file for name, file in weight_map.items()}
    single = directory / "model.safetensors"
    if not single.is_file():
        return {}
    with safe_open(single, "pt") as file:
        return dict.fromkeys(file.keys(), single)
