"""The ranks of a learner as torch sees them: how they meet, and the groups that they talk in.

Rank 0 opens a store on a free port and says where (`Rendezvous`); the others come to it. Tensors on
CPUs travel by gloo, on GPUs by NCCL. A second group, of gloo, is for the thread that writes
checkpoints: collectives of two threads must not mix.

Holds true: when `Ranks` exists, all ranks have met. A rank that dies has the collectives of the
others raise `RuntimeError` at once; one that hangs, after `timeout` seconds. Knows nothing of
models.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rhymeflow.errors import UserError

LOOPBACK = "127.0.0.1"

_ADDRESS_OF_INTERFACE = 0x8915
"""Linux's SIOCGIFADDR."""


class Rendezvous:
    """Where ranks meet; made by rank 0, which must keep it until all have come."""

    def __init__(self, num_ranks: int, *, host: str = LOOPBACK) -> None:
        self.store = dist.TCPStore(
            host, 0, num_ranks, is_master=True, wait_for_workers=False, use_libuv=True
        )
        self.address = f"{host}:{self.store.port}"


class Ranks:
    """This process as rank `rank` of `count`."""

    def __init__(
        self, rank: int, count: int, store: dist.Store, device: torch.device, timeout: float
    ) -> None:
        """Wait until all ranks have come. The device is this rank's."""
        self.rank, self.count, self.device = rank, count, device
        is_cuda = device.type == "cuda"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=timeout),
            device_id=device if is_cuda else None,
        )
        self.cpu_mesh: DeviceMesh = init_device_mesh("cpu", (count,))
        self.mesh = init_device_mesh("cuda", (count,)) if is_cuda else self.cpu_mesh
        self.saving = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    @classmethod
    def lead(
        cls, rendezvous: Rendezvous, count: int, device: torch.device, timeout: float
    ) -> Ranks:
        """Be rank 0."""
        _talk_through(interface_towards(rendezvous.address))
        return cls(0, count, rendezvous.store, device, timeout)

    @classmethod
    def join(
        cls, address: str, rank: int, count: int, device: torch.device, timeout: float
    ) -> Ranks:
        """Be another one."""
        _talk_through(interface_towards(address))
        host, _, port = address.rpartition(":")
        store = dist.TCPStore(host, int(port), count, timeout=timedelta(seconds=timeout))
        return cls(rank, count, store, device, timeout)

    def leave(self) -> None:
        """Give back what the groups have; the others need not be there any more."""
        dist.destroy_process_group()

    @property
    def is_lead(self) -> bool:
        """Whether this is rank 0, which speaks for all."""
        return self.rank == 0

    def rows(self, length: int) -> slice:
        """The rows of a tensor of `length` rows that this rank has, as FSDP2 shards dimension 0."""
        size = -(-length // self.count)
        start = min(self.rank * size, length)
        return slice(start, min(start + size, length))

    def gathered(self, value: Any) -> list[Any]:
        """Every rank's (small) value, on rank 0; elsewhere nothing."""
        values: list[Any] | None = [None] * self.count if self.is_lead else None
        dist.gather_object(value, values)
        return values or []

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's values, in place; on the CPU."""
        dist.all_reduce(values)
        return values


def device_of(rank: int, count: int, device: torch.device) -> torch.device:
    """The device of a rank on this machine.

    Raises:
        UserError: there are fewer GPUs than ranks.
    """
    check_gpus(count, device)
    if device.type != "cuda":
        return device
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def check_gpus(count: int, device: torch.device) -> None:
    """Raise `UserError` if this machine has fewer GPUs than there are ranks on such a device."""
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else count
    if num_gpus < count:
        raise UserError(
            f"learner.num_ranks = {count}: each rank needs a GPU of its own, and there "
            f"{'is' if num_gpus == 1 else 'are'} {num_gpus}"
        )


def interface_towards(address: str) -> str | None:
    """The network interface of this machine by which `address` (host:port) is reached.

    None where the system does not tell (Linux does).
    """
    host, _, port = address.rpartition(":")
    if host == LOOPBACK:
        return "lo" if sys.platform == "linux" else "lo0"
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # it has no address
                found = fcntl.ioctl(probe.fileno(), _ADDRESS_OF_INTERFACE, asked)[20:24]
                if socket.inet_ntoa(found) == own:
                    return name
    return None


def _talk_through(interface: str | None) -> None:
    """Gloo would look this host's name up, which may lead nowhere or outside."""
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


__all__ = ["Ranks", "Rendezvous", "device_of", "interface_towards"]
