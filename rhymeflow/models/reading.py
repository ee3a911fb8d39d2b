"""Where transformers finds a model or a tokenizer, and what is said when it does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub.constants import HF_HUB_CACHE
from safetensors import SafetensorError

from rhymeflow.config import ModelConfig
from rhymeflow.errors import UserError
from rhymeflow.models import hub
from rhymeflow.models.source import Source, locate


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


def offline(source: Source) -> dict[str, bool]:
    """Options for `from_pretrained`: the cache alone, where the hub does not answer."""
    return {"local_files_only": True} if source.is_hub and hub.unreachable() else {}


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
        why = hub.unreachable()
        if why is None:
            raise UserError(
                f"model.name = {source.name!r}: there is no such directory here, and of the hub "
                f"model {what} cannot be loaded: {reason}"
            ) from error
        raise UserError(
            f"model.name = {source.name!r}: there is no such directory here; as a Hugging Face hub "
            f"name, {what} is not in the cache ({HF_HUB_CACHE}) and {why}; {hub.WAYS_OUT}"
        ) from error


def _reason(error: Exception) -> str:
    """The error's first lines as one; a key says nothing without the kind of error."""
    text = " ".join(line.strip() for line in str(error).splitlines()[:2] if line.strip())
    kind = type(error).__name__
    return f"{kind}: {text}" if isinstance(error, KeyError) else text or kind
