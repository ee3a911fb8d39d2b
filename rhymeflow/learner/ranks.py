"""The ranks of a learner: how they meet, and the collectives that they use.

A learner of one rank has `ALONE`: no process group, and every collective returns what it is given.
Tensors on CPUs travel by gloo, on GPUs by NCCL. A second group, of gloo, is for the thread that
writes checkpoints: collectives of two threads must not mix. A rank that dies has the collectives of
the others raise `RuntimeError` at once; one that hangs, after `timeout` seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rhymeflow.errors import UserError
from rhymeflow.utils import progress

LOOPBACK = "127.0.0.1"

_ADDRESS_OF_INTERFACE = 0x8915
"""Linux's SIOCGIFADDR."""


class Rendezvous:
    """Where ranks meet: rank 0 makes it on a free port and keeps it until all have come."""

    def __init__(self, num_ranks: int, *, host: str = LOOPBACK) -> None:
        self.store = TCPStore(
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
        store = TCPStore(host, int(port), count, timeout=timedelta(seconds=timeout))
        return cls(rank, count, device)._met(store, timeout)

    def _met(self, store: Store, timeout: float) -> Ranks:
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


class Gathering(Mapping[str, Tensor]):
    """Tensors whose rows are spread over ranks, made whole on rank 0, one block after the other.

    They are the parameters of `model` by name, tied ones once, in `dtype`. Rank 0 looks them up in
    their order while the others `give` their rows; or all ranks go through `blocks`. No rank ever
    has more than its rows and one block, which only rank 0 has; on one rank the tensors are those
    that there are, not copied where they have the `dtype`. `rows` returns this rank's rows of one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Callable[[str], Tensor],
        dtype: torch.dtype,
        ranks: Ranks,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._shapes = {name: each.shape for name, each in model.named_parameters()}
        self._names = _blocks_of(model) if ranks.count > 1 else [list(self._shapes)]
        self._rows = rows
        self.dtype, self._ranks, self._group = dtype, ranks, group
        self._left = self.blocks()
        self._block: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        while name in self._shapes and name not in self._block:
            self._block = {}  # before the next one is there
            block = next(self._left, None)
            assert block is not None, f"{name} was looked up after what follows it"
            self._block = block
        return self._block[name]

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def give(self) -> None:
        """For the other ranks: give rank 0 what it looks up."""
        for _ in self.blocks():
            pass

    def blocks(self) -> Iterator[dict[str, Tensor]]:
        """Every block; on ranks but 0 each is empty. All ranks have to go through all."""
        for names in self._names:
            progress.advance()
            if self._ranks.count == 1:
                yield {name: self._rows(name).to(self.dtype) for name in names}
            else:
                yield self._gather(names)

    def _gather(self, names: Sequence[str]) -> dict[str, Tensor]:
        lengths = [self._padded_size(self._shapes[name]) for name in names]
        ends = np.cumsum(lengths)
        starts = ends - lengths
        count = self._ranks.count if self._ranks.is_lead else 1
        device = self._rows(names[0]).device
        parts_NS = torch.zeros((count, int(ends[-1])), dtype=self.dtype, device=device)
        for name, start in zip(names, starts, strict=True):
            rows = self._rows(name).reshape(-1)
            parts_NS[0, start : start + len(rows)] = rows
        # One by one, into their place: gloo's `gather` would make a copy of all.
        if not self._ranks.is_lead:
            dist.send(parts_NS[0], 0, group=self._group)
            return {}
        for rank in range(1, self._ranks.count):
            dist.recv(parts_NS[rank], rank, group=self._group)
        whole: dict[str, Tensor] = {}
        for name, start, end in zip(names, starts, ends, strict=True):
            shape = self._shapes[name]
            # Of a block of one tensor this is the tensor; else a copy.
            whole[name] = parts_NS[:, start:end].reshape(-1)[: math.prod(shape)].view(*shape)
        return whole

    def _padded_size(self, shape: Sequence[int]) -> int:
        """Numbers in the most rows of a rank. Only those after the last row of all are padding."""
        return -(-shape[0] // self._ranks.count) * math.prod(shape[1:])


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """Its transformer layers."""
    return [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]


def _blocks_of(model: PreTrainedModel) -> list[list[str]]:
    """Names of its parameters in its order: those of a layer, and each of the others alone."""
    layer_of = {id(p): n for n, layer in enumerate(layers_of(model)) for p in layer.parameters()}
    blocks: list[list[str]] = []
    previous = None
    for name, parameter in model.named_parameters():
        layer = layer_of.get(id(parameter))
        if layer is None or layer != previous:
            blocks.append([])
        blocks[-1].append(name)
        previous = layer
    return blocks


def device_of(rank: int, count: int, device: torch.device) -> torch.device:
    """The device of a rank on this machine."""
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
    """The network interface of this machine by which `address` (host:port) is reached; None where
    the system does not tell (Linux does)."""
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
