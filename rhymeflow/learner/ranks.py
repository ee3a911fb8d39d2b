"""The ranks of a learner: how they meet, and the collectives that they use.

A learner of one rank has `ALONE`: no process group, and every collective returns what it is given.
Tensors on CPUs travel by gloo, on GPUs by NCCL. A second group, of gloo, is for the thread that
writes checkpoints: collectives of two threads must not mix. A rank that dies has the collectives of
the others raise `RuntimeError` at once; one that hangs, after `timeout` seconds.
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
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from rhymeflow.errors import UserError

LOOPBACK = "127.0.0.1"

_ADDRESS_OF_INTERFACE = 0x8915
"""Linux's SIOCGIFADDR."""


class Rendezvous:
    """Where ranks meet: rank 0 makes it on a free port and keeps it until all have come."""

    def __init__(self, num_ranks: int, *, host: str = LOOPBACK) -> None:
        self.store = dist.TCPStore(
            host, 0, num_ranks, is_master=True, wait_for_workers=False, use_libuv=True
        )
        self.address = f"{host}:{self.store.port}"


class Ranks:
    """This process as rank `rank` of `count`. Use `ALONE`, `lead` or `join`."""

    def __init__(self, rank: int, count: int, device: torch.device | None = None) -> None:
        self.rank, self.count, self.device = rank, count, device
        self.mesh: DeviceMesh | None = None
        self.cpu_mesh: DeviceMesh | None = None
        self.saving: dist.ProcessGroup | None = None

    @classmethod
    def lead(
        cls, rendezvous: Rendezvous, count: int, device: torch.device, timeout: float
    ) -> Ranks:
        """Be rank 0, once the others have come. The device is this rank's."""
        _talk_through(interface_towards(rendezvous.address))
        return cls(0, count, device)._met(rendezvous.store, timeout)

    @classmethod
    def join(
        cls, address: str, rank: int, count: int, device: torch.device, timeout: float
    ) -> Ranks:
        """Be another one."""
        _talk_through(interface_towards(address))
        host, _, port = address.rpartition(":")
        store = dist.TCPStore(host, int(port), count, timeout=timedelta(seconds=timeout))
        return cls(rank, count, device)._met(store, timeout)

    def _met(self, store: dist.Store, timeout: float) -> Ranks:
        assert self.device is not None
        is_cuda, limit = self.device.type == "cuda", timedelta(seconds=timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
            store=store,
            rank=self.rank,
            world_size=self.count,
            timeout=limit,
            device_id=self.device if is_cuda else None,
        )
        self.cpu_mesh = init_device_mesh("cpu", (self.count,))
        self.mesh = init_device_mesh("cuda", (self.count,)) if is_cuda else self.cpu_mesh
        self.saving = dist.new_group(backend="gloo", timeout=limit)
        return self

    def leave(self) -> None:
        """Give back what the groups have; the others need not be there any more."""
        if self.count > 1:
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

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's rows of a parameter or of its gradient, without gradient."""
        tensor = tensor.detach()
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def gathered(self, value: Any) -> list[Any]:
        """Every rank's (small) value, on rank 0; elsewhere nothing."""
        if self.count == 1:
            return [value]
        values: list[Any] | None = [None] * self.count if self.is_lead else None
        dist.gather_object(value, values)
        return values or []

    def summed(self, values: Tensor) -> Tensor:
        """The sum of every rank's values, in place; on the CPU."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def told(self, value: Any) -> Any:
        """Rank 0's (small) value, on every rank; for the thread that writes checkpoints."""
        said = [value]
        if self.count > 1:
            dist.broadcast_object_list(said, 0, group=self.saving)
        return said[0]


ALONE = Ranks(0, 1)
"""The one rank of a learner of one."""


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
