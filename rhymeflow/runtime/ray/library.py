"""Ray itself: found, connected to, left.

A Ray that was started here ends with the run, and one that was there stays. What starts here
listens on the loopback only, and reports no usage to Ray's makers.
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
"""What a driver says to have Ray print nothing of its own."""

_ALONE = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}
"""Environment of a Ray of this machine alone, where nothing else is set. Ray's default niceness is
15, and its workers do all the work."""


def check_version() -> None:
    """Raise `UserError` if Ray is not installed, or is another version; imports nothing."""
    get = how_to_install("ray")
    try:
        found = metadata.version("ray")
    except metadata.PackageNotFoundError:
        raise UserError(f"runtime = 'ray' needs the package ray: {get}") from None
    if not found.startswith(f"{VERSION}."):
        raise UserError(f"runtime = 'ray' needs ray {VERSION}, and {found} is installed: {get}")


def load(address: str | None) -> ModuleType:
    """Import Ray for the cluster at `address`, or for this machine alone (None). Raises `UserError`
    if it is not installed, or is another version."""
    check_version()
    if address is None:
        for name, value in _ALONE.items():  # some are read when Ray is imported
            os.environ.setdefault(name, value)
    import ray
    import ray.util.scheduling_strategies

    found: ModuleType = ray
    return found


@contextmanager
def connected(address: str | None, *, num_cpus: int) -> Iterator[ModuleType]:
    """Be a driver of the cluster at `address`; None starts one, with so many logical CPUs. One that
    is a driver already stays one. Raises `UserError` if there is no such cluster."""
    ray = load(address)
    if ray.is_initialized():
        yield ray
        return
    alone = {"num_cpus": num_cpus, "include_dashboard": False}
    how = QUIET | (alone if address is None else {"address": address})
    if address is None or address.startswith(LOOPBACK):
        how["_node_ip_address"] = LOOPBACK  # else it is asked how the outside would be reached
    try:
        ray.init(**how)
    except (ConnectionError, ValueError) as error:
        raise UserError(f"ray.address = {address!r}: {str(error).splitlines()[0]}") from None
    try:
        yield ray
    finally:
        ray.shutdown()
