"""The ranks of a learner: how they connect, and the collectives that they use.

A learner of one rank has `ALONE`: no process group, and every collective returns its argument. CPU
tensors use gloo, GPU tensors NCCL. The threads that write checkpoints and publish weights have gloo
groups of their own, since collectives of two threads must not mix. When a rank dies, collectives of
the others raise `RuntimeError` at once; when one hangs, after `timeout` seconds.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rhymeflow.models.lora import versioned
from rhymeflow.utils import progress
from rhymeflow.utils.objects import LOOPBACK

_SIOCGIFADDR = 0x8915
"""Linux's request for the address of a network interface."""


MeetingPlace = TCPStore | str
"""Where ranks connect: the store itself on rank 0, its address (host:port) on the others."""


def meeting_place(num_ranks: int, *, host: str = LOOPBACK) -> TCPStore:
    """Create the store where ranks connect, on a free port; rank 0 keeps it until all have."""
    return TCPStore(host, 0, num_ranks, is_master=True, wait_for_workers=False, use_libuv=True)


def address_of(store: TCPStore) -> str:
    """Return the store's address, for the other ranks."""
    return f"{store.host}:{store.port}"


class Ranks:
    """This process as rank `rank` of `count`; `ALONE` or made by `meet`."""

    def __init__(self, rank: int, count: int, device: torch.device | None = None) -> None:
        self.rank, self.count, self.device = rank, count, device
        self.mesh: DeviceMesh | None = None
        self.cpu_mesh: DeviceMesh | None = None
        self.saving: dist.ProcessGroup | None = None  # of the thread that writes checkpoints
        self._summing: dist.ProcessGroup | None = None  # None: that of all other collectives
        self.publishing = self
        """These ranks for the thread that publishes weights."""

    @classmethod
    def meet(
        cls, at: MeetingPlace, rank: int, count: int, device: torch.device, timeout: float
    ) -> Ranks:
        """Connect as a rank that computes on `device`; return when all ranks have connected."""
        self, limit = cls(rank, count, device), timedelta(seconds=timeout)
        if isinstance(at, str):
            host, _, port = at.rpartition(":")
            at = TCPStore(host, int(port), count, timeout=limit)
        # Gloo would resolve this host's name, which may fail or give an external address.
        if (interface := interface_towards(at.host, at.port)) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        is_cuda = device.type == "cuda"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
            store=at,
            rank=rank,
            world_size=count,
            timeout=limit,
            device_id=device if is_cuda else None,
        )
        self.cpu_mesh = init_device_mesh("cpu", (count,))
        self.mesh = init_device_mesh("cuda", (count,)) if is_cuda else self.cpu_mesh
        self.saving = dist.new_group(backend="gloo", timeout=limit)
        self.publishing = copy.copy(self)
        self.publishing._summing = dist.new_group(backend="gloo", timeout=limit)
        return self

    def leave(self) -> None:
        """Destroy the process groups; the other ranks may already be gone."""
        if self.count > 1:
            dist.destroy_process_group()

    @property
    def is_lead(self) -> bool:
        """Whether this is rank 0, which reports for all."""
        return self.rank == 0

    def rows(self, length: int, rank: int | None = None) -> slice:
        """Return the rows that a rank (None: this one) has of a tensor of `length` rows, as FSDP2
        shards dimension 0."""
        size = -(-length // self.count)
        start = min((self.rank if rank is None else rank) * size, length)
        return slice(start, min(start + size, length))

    def local(self, tensor: Tensor) -> Tensor:
        """Return this rank's rows of a parameter or gradient, detached."""
        tensor = tensor.detach()
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def gathered(self, value: Any) -> list[Any]:
        """Return every rank's (small) value on rank 0, an empty list on the others."""
        if self.count == 1:
            return [value]
        values: list[Any] | None = [None] * self.count if self.is_lead else None
        dist.gather_object(value, values)
        return values or []

    def summed(self, values: Tensor) -> Tensor:
        """Sum every rank's values, a CPU tensor, in place; return it."""
        if self.count > 1:
            dist.all_reduce(values, group=self._summing)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's (small) value on every rank; for the thread that writes checkpoints."""
        values = [value]
        if self.count > 1:
            dist.broadcast_object_list(values, 0, group=self.saving)
        return values[0]


ALONE = Ranks(0, 1)
"""The only rank of a learner with one rank."""


class Gathering(Mapping[str, Tensor]):
    """Sharded tensors that rank 0 gathers one by one.

    They are the `versioned` parameters of `model`, in `dtype`; `rows` returns this rank's rows of
    one; and `others`, given as they are. All ranks iterate over `blocks`, of parameters. No rank
    has more than its rows and, on rank 0, one block. With one rank, the tensors are the parameters
    themselves, or all the rows that there are, copied only if they have another dtype.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Callable[[str], Tensor],
        dtype: torch.dtype,
        ranks: Ranks,
        group: dist.ProcessGroup | None = None,
        others: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        self._others = others
        self._shapes = {name: each.shape for name, each in versioned(model).items()}
        self._blocks = _blocks_of(model) if ranks.count > 1 else [list(self._shapes)]
        self._rows = rows
        self._dtype, self._ranks, self._group = dtype, ranks, group

    def __getitem__(self, name: str) -> Tensor:
        progress.advance()
        if name in self._others:
            return self._others[name]
        local, ranks = self._rows(name).to(self._dtype), self._ranks
        if ranks.count == 1:
            return local
        if not ranks.is_lead:
            if len(local):
                dist.send(local.contiguous(), 0, group=self._group)
            return local
        whole = torch.empty(self._shapes[name], dtype=self._dtype, device=local.device)
        whole[: len(local)] = local
        # Receive in place, rank by rank: gloo's `gather` would make a copy of all.
        for rank in range(1, ranks.count):
            if len(rows := whole[ranks.rows(len(whole), rank)]):
                dist.recv(rows, rank, group=self._group)
        return whole

    def __contains__(self, name: object) -> bool:
        return name in self._shapes or name in self._others

    def __iter__(self) -> Iterator[str]:
        return chain(self._shapes, self._others)

    def __len__(self) -> int:
        return len(self._shapes) + len(self._others)

    @property
    def num_blocks(self) -> int:
        """The number of `blocks`."""
        return len(self._blocks)

    def blocks(self) -> Iterator[dict[str, Tensor]]:
        """Yield each block: a layer's tensors, or another tensor; on ranks other than 0, the rank's
        rows of them. All ranks must iterate over all blocks."""
        for names in self._blocks:
            yield {name: self[name] for name in names}


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the model's transformer layers."""
    return [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]


def _blocks_of(model: PreTrainedModel) -> list[list[str]]:
    """Return the parameters' names in order: one block for each layer, and for each other one."""
    layer_of = {id(p): n for n, layer in enumerate(layers_of(model)) for p in layer.parameters()}
    blocks: list[list[str]] = []
    previous = None
    for name, parameter in versioned(model).items():
        layer = layer_of.get(id(parameter))
        if layer is None or layer != previous:
            blocks.append([])
        blocks[-1].append(name)
        previous = layer
    return blocks


def own_gpu(device: torch.device) -> torch.device:
    """Return the GPU of this rank, by its number and as the current one, which FSDP2 and NCCL want;
    or the CPU. A rank's process sees one GPU, by either runtime."""
    if device.type != "cuda":
        return device
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def interface_towards(host: str, port: int) -> str | None:
    """Return this machine's network interface towards an address; None if the system cannot tell,
    as only Linux can."""
    if host == LOOPBACK:
        return "lo" if sys.platform == "linux" else "lo0"
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        local_address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # it has no address
                address = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]
                if socket.inet_ntoa(address) == local_address:
                    return name
    return None
