"""Converts GGUF weights to a Hugging Face checkpoint in float32, and caches it.

SmolLM2's GGUF file loads in 16 seconds, the converted directory in one. Directories are in
`$XDG_CACHE_HOME/rhymeflow/converted` (`~/.cache` by default), named by a hash of the file and the
version of transformers, and created by a rename, so they are complete. Deleting them is safe."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash
from transformers import AutoModelForCausalLM, AutoTokenizer

from rhymeflow.errors import UserError

_FORMAT = 1  # part of the directories' names; increment it when the converted files change


def converted(gguf: Path) -> Path:
    """Return the directory of the converted checkpoint, converting it if it is not in the cache.
    Raises `UserError` if the package gguf is missing, the file is not a GGUF model, or the cache
    cannot be written."""
    target = _cache() / f"{gguf.stem}-{_key(gguf)}"
    if target.is_dir():
        return target
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"{gguf} needs the Python package 'gguf': pip install gguf")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{gguf.stem}-")
    except OSError as error:
        raise UserError(
            f"the cache for converted weights cannot be written: {error}; "
            "point XDG_CACHE_HOME to a directory that can"
        ) from error
    with scratch:
        unfinished = Path(scratch.name) / "checkpoint"
        _convert(gguf, unfinished)
        try:
            unfinished.rename(target)
        except OSError:
            if not target.is_dir():  # else another process has just converted it
                raise
    return target


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "rhymeflow" / "converted"


def _key(gguf: Path) -> str:
    content = xxhash.xxh3_128(f"{_FORMAT} transformers {transformers.__version__}".encode())
    with gguf.open("rb") as file:
        while block := file.read(1 << 24):
            content.update(block)
    return content.hexdigest()[:16]


def _convert(gguf: Path, target: Path) -> None:
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise UserError(f"{gguf} cannot be read as a GGUF model: {error}") from error
    forget_quantization(model)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def forget_quantization(model: Any) -> None:
    """Remove the quantization config of dequantized weights, which would break saving."""
    model.hf_quantizer = None
    model.is_quantized = False
    for attribute in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, attribute):
            delattr(model.config, attribute)
