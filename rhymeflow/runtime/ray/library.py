"""Checks Ray's version, imports it, connects to a cluster or starts one, and asks its nodes.

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

from rhymeflow.config import Config
from rhymeflow.engine.vllm.installed import check_installed
from rhymeflow.errors import UserError
from rhymeflow.utils.extras import how_to_install
from rhymeflow.utils.gpus import VISIBLE
from rhymeflow.utils.objects import LOOPBACK

VERSION = "2.60"
ANSWER_SECONDS = 120.0
"""Time that a node has to say what it has: its Python starts, and loads torch."""

QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
"""Options of `ray.init` with which Ray prints nothing."""

_ALONE = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}
"""Default environment of a Ray that is started here. Its workers do all the work, so they have
niceness 0; Ray's own default is 15."""


class NotReachable(UserError):  # noqa: N818
    """There is no cluster at `ray.address`, or it does not answer."""


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

    return ray


def cores_of_gpu(ray: Any) -> int:
    """Return the cores for each GPU, on the node that has fewest for one; 1 if there are no GPUs
    yet. `ray` is connected."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return max(1, min((int(n.get("CPU", 0) // n["GPU"]) for n in nodes if n.get("GPU")), default=1))


@contextmanager
def connected(address: str | None, *, num_cpus: int) -> Iterator[ModuleType]:
    """Connect to the cluster at `address`; None starts one with `num_cpus` logical CPUs. A process
    that is connected already stays so. Raises `NotReachable` if there is no such cluster."""
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
        raise NotReachable(f"ray.address = {address!r}: {str(error).splitlines()[0]}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def num_gpus_of_nodes(config: Config) -> int:
    """Ask the nodes of the cluster at `ray.address` whether workers can run there: those with GPUs,
    if the run computes on GPUs. Return the number of GPUs, of which an autoscaler may add more.

    Raises:
        NotReachable: there is no such cluster.
        UserError: a node lacks a package, or its torch does not find its GPUs.
    """
    with connected(config.ray.address, num_cpus=0) as ray:
        nodes = _alive(ray)
        with_gpus = [node for node in nodes if node["Resources"].get("GPU")]
        has_gpus = bool(with_gpus) and config.model.device != "cpu"
        if config.model.device == "cuda" or has_gpus:
            nodes = with_gpus
        # A process that has asked for GPUs is not used again.
        ask = ray.remote(num_cpus=0, max_retries=0, max_calls=1)(lacks)
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        theirs = [affinity(node["NodeID"], soft=False) for node in nodes]
        asks = [ask.options(scheduling_strategy=there) for there in theirs]
        answers = [each.remote(config.model_dump_json(), has_gpus=has_gpus) for each in asks]
        for node, answer in zip(nodes, answers, strict=True):
            try:
                problem = ray.get(answer, timeout=ANSWER_SECONDS)
            except ray.exceptions.RayError as error:
                if node["NodeID"] not in {each["NodeID"] for each in _alive(ray)}:
                    continue  # lost meanwhile, as it may be at any time: the others run
                said = [line for line in str(error).splitlines() if line.strip()]
                problem = f"Rhymeflow does not run there: {(said or [type(error).__name__])[-1]}"
            if problem:
                raise UserError(f"node {node['NodeManagerHostname']}: {problem}")
        return int(sum(node["Resources"]["GPU"] for node in with_gpus))


def _alive(ray: Any) -> list[Any]:
    return [node for node in ray.nodes() if node["Alive"]]


def lacks(config: str, *, has_gpus: bool) -> str:
    """Return what this node lacks for a worker, or "". It runs on a node, as a task."""
    given = Config.model_validate_json(config)
    try:
        check_installed(given)
        if has_gpus:
            from rhymeflow.models.precision import resolve_device

            if not os.environ.get(VISIBLE):  # some Ray's hide GPUs from a task that takes none
                os.environ.pop(VISIBLE, None)
            resolve_device(given.model.model_copy(update={"device": "cuda"}))
    except UserError as error:
        return str(error)
    return ""
