"""Where transformers finds a model or a tokenizer, and what is said when it does not."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.constants import HF_HUB_CACHE
from safetensors import SafetensorError, safe_open

from rhymeflow.config import ModelConfig
from rhymeflow.errors import UserError
from rhymeflow.models.source import Source, locate

PATIENCE = 5.0
"""Seconds that the hub has to answer."""

WAYS_OUT = (
    "give a local directory that holds the model; or fill the cache where there is a network and "
    "set HF_HOME to it here (HF_HUB_OFFLINE=1 then asks nobody); or set HF_ENDPOINT to a mirror"
)


@cache
def unreachable() -> str | None:
    """Return why nothing can be fetched from the hub, or None if it answers.

    Found out once: else each file of a model is asked for five times, with growing pauses.
    """
    endpoint = constants.ENDPOINT
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        asked = urllib.request.Request(endpoint, method="HEAD")
        urllib.request.urlopen(asked, timeout=PATIENCE).close()
    except urllib.error.HTTPError:
        return None  # it answers
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):
            return None  # it answers; the hub's own client has certificates of its own
        what = getattr(reason, "strerror", None) or reason
        return f"{endpoint} cannot be reached: {what}"
    return None


def readable(config: ModelConfig) -> Source:
    """The model's source in a format that transformers loads quickly."""
    source = locate(config)
    if source.gguf_path is None:
        if source.gguf_file is not None:
            raise UserError(
                f"model.gguf_file = {source.gguf_file!r} of hub model {source.name!r}: "
                "download the file and give its directory as model.name"
            )
        return source
    from rhymeflow.models.converted import converted  # loads torch and all of transformers

    return Source(source.name, str(converted(source.gguf_path)))


def offline(source: Source) -> dict[str, Any]:
    """Options for `from_pretrained`: the cache alone, where the hub does not answer."""
    return {"local_files_only": True} if source.is_hub and unreachable() else {}


@contextmanager
def explained(source: Source, what: str = "the config") -> Iterator[None]:
    """Turn transformers' ways of failing to read a model into one line for the user."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        if isinstance(error, UserError):
            raise
        reason = _reason(error)
        if not source.is_hub:
            names = ("tokenizer.json", "tokenizer.model")
            folder = Path(source.location)
            if what == "the tokenizer" and not any((folder / name).exists() for name in names):
                reason = f"it holds neither {' nor '.join(names)}"
            raise UserError(
                f"model.name = {source.name!r}: {what} cannot be loaded from {source.location}: "
                f"{reason}"
            ) from error
        why = unreachable()
        if why is None:
            raise UserError(
                f"model.name = {source.name!r}: there is no such directory here, and of the hub "
                f"model {what} cannot be loaded: {reason}"
            ) from error
        raise UserError(
            f"model.name = {source.name!r}: there is no such directory here; as a Hugging Face hub "
            f"name, {what} is not in the cache ({HF_HUB_CACHE}) and {why}; {WAYS_OUT}"
        ) from error


def _reason(error: Exception) -> str:
    """The error's first lines as one; a key says nothing without the kind of error."""
    text = " ".join(line.strip() for line in str(error).splitlines()[:2] if line.strip())
    kind = type(error).__name__
    return f"{kind}: {text}" if isinstance(error, KeyError) else text or kind


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
