"""Whether a model could be loaded, by what lies on the disk. Loads no torch, reads no weights."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open

from rhymeflow.config import ModelConfig
from rhymeflow.errors import UserError
from rhymeflow.models.reading import explained
from rhymeflow.models.source import locate

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
            with safe_open(file, framework="np"):  # reads the header, and compares the size
                pass
