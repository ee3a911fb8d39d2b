"""Checks Ray's version, imports it, and connects to a cluster or starts one.

A cluster that is started here ends with the run; it listens on the loopback address only, and
reports no usage to Ray's makers. A cluster that existed before stays.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from types import ModuleType
from typing import Any

from rhymeflow.errors import UserError
from rhymeflow.utils.extras import how_to_install

VERSION = "2.60"
LOOPBACK = "127.0.0.1"

QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
"""Options of `ray.init` with which Ray prints nothing."""

_ALONE = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}
"""Default environment of a Ray that is started here. Its workers do all the work, so they have
niceness 0; Ray's own default is 15."""


def check_version() -> None:
    """Raise `UserError` if Ray is not installed or has another version; imports nothing."""
    hint = how_to_install("ray")
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError:
        raise UserError(f"runtime = 'ray' needs the package ray: {hint}") from None
    if not version.startswith(f"{VERSION}."):
        raise UserError(f"runtime = 'ray' needs ray {VERSION}, and {version} is installed: {hint}")


def load(address: str | None) -> ModuleType:
    """Import Ray for the cluster at `address`, or for this machine alone (None). Raises `UserError`
    if it is not installed or has another version."""
    check_version()
    if address is None:
        for name, value in _ALONE.items():  # some are read when Ray is imported
            os.environ.setdefault(name, value)
    import ray
    import ray.util.scheduling_strategies

    module: ModuleType = ray
    return module


@contextmanager
def connected(address: str | None, *, num_cpus: int) -> Iterator[ModuleType]:
    """Connect to the cluster at `address`; None starts one with `num_cpus` logical CPUs. A process
    that is connected already stays so. Raises `UserError` if there is no such cluster."""
    ray = load(address)
    if ray.is_initialized():
        yield ray
        return
    alone = {"num_cpus": num_cpus, "include_dashboard": False}
    options = QUIET | (alone if address is None else {"address": address})
    if address is None or address.startswith(LOOPBACK):
        options["_node_ip_address"] = LOOPBACK  # else Ray looks for an outside address
    try:
        ray.init(**options)
    except (ConnectionError, ValueError) as error:
        raise UserError(f"ray.address = {address!r}: {str(error).splitlines()[0]}") from None
    try:
        yield ray
    finally:
        ray.shutdown()
