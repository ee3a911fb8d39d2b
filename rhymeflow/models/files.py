"""Whether a model could be loaded, by what lies on the disk; weights are not read.

Knows nothing of what the model is used for.
"""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from transformers import GenerationConfig, PreTrainedTokenizerBase

from rhymeflow.config import ModelConfig
from rhymeflow.errors import UserError
from rhymeflow.models import hub
from rhymeflow.models.explained import explained, offline
from rhymeflow.models.load import load_config, readable, stop_tokens
from rhymeflow.models.source import Source, locate

_POINTER = b"version https://git-lfs"
"""How a file begins that Git LFS has not fetched."""


def check_files(config: ModelConfig) -> None:
    """Look whether the weights of a local directory can be opened; reads no weights.

    Raises:
        UserError: a file is missing, cut short, or no weights.
    """
    source = locate(config)
    if source.is_hub or source.gguf_file is not None:
        return
    folder = Path(source.location)
    files = sorted(folder.glob("*.safetensors"))
    if not files and not any(folder.glob("pytorch_model*.bin")):
        raise UserError(
            f"model.name = {source.name!r}: {folder} holds no weights (no *.safetensors, no "
            "pytorch_model.bin)"
        )
    index = folder / "model.safetensors.index.json"
    with explained(source, "the weights"):
        if index.is_file():
            named = set(json.loads(index.read_text())["weight_map"].values())
            files = [folder / name for name in sorted(named)]
        for file in files:
            with file.open("rb") as opened:
                if opened.read(len(_POINTER)) == _POINTER:
                    raise OSError(f"{file.name} is a Git LFS pointer; `git lfs pull` fetches it")
            with safe_open(file, framework="pt"):  # reads the header, and compares the size
                pass


def check_end(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Look whether a response can end, and a hub model's weights are to be had.

    Raises:
        UserError: nobody names a token that ends a response; or the hub cannot be reached, and the
            weights are not in the cache.
    """
    source = readable(config)
    generation = None
    if source.is_hub or (Path(source.location) / "generation_config.json").is_file():
        try:
            generation = GenerationConfig.from_pretrained(source.location, **offline(source))
        except OSError:  # it need not have one
            generation = None
    stop_tokens(config.name, generation, load_config(config), tokenizer)
    if source.is_hub:
        _check_cached(source)


def _check_cached(source: Source) -> None:
    if hub.unreachable() is None:
        return
    with explained(source, "a file of the weights"):
        names = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
        found = [try_to_load_from_cache(source.location, name) for name in names]
        if not any(isinstance(each, str) for each in found):
            raise OSError("none is in the cache")
