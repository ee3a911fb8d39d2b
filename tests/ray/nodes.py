"""Several logical nodes of a Ray cluster on this machine: for tests and the demo.

Each has its own Ray processes and object store, so one can be killed as a machine would be; cores
and files they share. All of it listens on the loopback, and nothing is left when the block ends. A
node that is gone is noticed after some ten seconds."""

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from rhymeflow.runtime.ray import library

SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "10",
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_worker_niceness": "0",
    "OMP_NUM_THREADS": "1",
}
"""Environment of Ray's processes; some of it is read when Ray is imported."""

STORE_BYTES = 100_000_000  # of each node's object store


class LogicalNodes:
    """The cluster, as `logical_nodes` makes it."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._others: dict[str, Any] = {}

    @property
    def address(self) -> str:
        """For `ray.address`."""
        address: str = self._cluster.address
        return address

    def add(self, num_cpus: int = 1) -> str:
        """A node joins; its id."""
        node = self._cluster.add_node(num_cpus=num_cpus, **_given())
        self._others[node.node_id] = node
        found: str = node.node_id
        return found

    def kill(self, node: str) -> None:
        """Kill all processes of a node, but the head."""
        self._cluster.remove_node(self._others.pop(node), allow_graceful=False)

    def raylet(self, node: str) -> int:
        """Process id of what stands for a node, but the head; its children are the workers."""
        (found,) = self._others[node].all_processes["raylet"]
        pid: int = found.process.pid
        return pid

    @property
    def others(self) -> list[str]:
        """The nodes beside the head."""
        return list(self._others)


@contextmanager
def logical_nodes(*cpus: int) -> Iterator[LogicalNodes]:
    """A cluster whose nodes have so many logical CPUs each, the head first. Raises `UserError` if
    Ray is not installed."""
    with ExitStack() as ending:
        ending.callback(_restore, dict(os.environ))
        os.environ.update(SETTINGS, RAY_AUTH_TOKEN=secrets.token_hex(32))
        ray = library.load("")
        from ray.cluster_utils import Cluster

        for module, name, instead in (
            (ray.util, "get_node_ip_address", lambda *_: library.LOOPBACK),
            # Else nodes can be added by the main thread only, and this process's signals are Ray's.
            (ray._private.utils, "set_sigterm_handler", lambda handler: None),
            # Pages for each node that dies; the run says so in a line.
            (ray._private.worker, "print_worker_logs", lambda *_: None),
        ):
            ending.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, instead)
        head = {"num_cpus": cpus[0], "include_dashboard": False, **_given()}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        ending.callback(cluster.shutdown)
        ending.callback(ray.shutdown)
        nodes = LogicalNodes(cluster)
        for count in cpus[1:]:
            nodes.add(count)
        yield nodes


def _given() -> dict[str, Any]:
    """What every node is given."""
    return {"node_ip_address": library.LOOPBACK, "object_store_memory": STORE_BYTES}


def _restore(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
