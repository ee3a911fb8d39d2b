"""The ranks of a learner: how they meet, and the collectives that they use.

A learner of one rank has `ALONE`: no process group, and every collective returns what it is given.
Tensors on CPUs travel by gloo, on GPUs by NCCL. A second gloo group is for the thread that writes
checkpoints: collectives of two threads must not mix. When a rank dies, the collectives of the
others raise `RuntimeError` at once; when one hangs, after `timeout` seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rhymeflow.errors import UserError
from rhymeflow.utils import progress

LOOPBACK = "127.0.0.1"

_ADDRESS_OF_INTERFACE = 0x8915
"""Linux's SIOCGIFADDR."""


MeetingPlace = TCPStore | str
"""Of rank 0 the place, of the others its address (host:port)."""


def meeting_place(num_ranks: int, *, host: str = LOOPBACK) -> TCPStore:
    """Where ranks meet: rank 0 makes it on a free port and keeps it until all have come."""
    return TCPStore(host, 0, num_ranks, is_master=True, wait_for_workers=False, use_libuv=True)


def address_of(store: TCPStore) -> str:
    """Of a meeting place, for the other ranks."""
    return f"{store.host}:{store.port}"


class Ranks:
    """This process as rank `rank` of `count`. Use `ALONE` or `meet`."""

    def __init__(self, rank: int, count: int, device: torch.device | None = None) -> None:
        self.rank, self.count, self.device = rank, count, device
        self.mesh: DeviceMesh | None = None
        self.cpu_mesh: DeviceMesh | None = None
        self.saving: dist.ProcessGroup | None = None

    @classmethod
    def meet(
        cls, at: MeetingPlace, rank: int, count: int, device: torch.device, timeout: float
    ) -> Ranks:
        """Be a rank that computes on `device`, once all have come."""
        self, limit = cls(rank, count, device), timedelta(seconds=timeout)
        if isinstance(at, str):
            host, _, port = at.rpartition(":")
            at = TCPStore(host, int(port), count, timeout=limit)
        # Gloo would look this host's name up, which may lead nowhere or outside.
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
        return self

    def leave(self) -> None:
        """Give back what the groups have; the others need not be there any more."""
        if self.count > 1:
            dist.destroy_process_group()

    @property
    def is_lead(self) -> bool:
        """Whether this is rank 0, which speaks for all."""
        return self.rank == 0

    def rows(self, length: int, rank: int | None = None) -> slice:
        """The rows of a tensor of `length` rows that a rank has, this one if none is named, as
        FSDP2 shards dimension 0."""
        size = -(-length // self.count)
        start = min((self.rank if rank is None else rank) * size, length)
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
    """Tensors whose rows are spread over ranks, made whole on rank 0 one after the other.

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
        self._dtype, self._ranks, self._group = dtype, ranks, group

    def __getitem__(self, name: str) -> Tensor:
        progress.advance()
        own, ranks = self._rows(name).to(self._dtype), self._ranks
        if ranks.count == 1:
            return own
        if not ranks.is_lead:
            if len(own):
                dist.send(own.contiguous(), 0, group=self._group)
            return own
        whole = torch.empty(self._shapes[name], dtype=self._dtype, device=own.device)
        whole[: len(own)] = own
        # One by one, into their place: gloo's `gather` would make a copy of all.
        for rank in range(1, ranks.count):
            if len(rows := whole[ranks.rows(len(whole), rank)]):
                dist.recv(rows, rank, group=self._group)
        return whole

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    @property
    def num_blocks(self) -> int:
        """How many `blocks` has."""
        return len(self._names)

    def give(self) -> None:
        """For the other ranks: give rank 0 what it looks up."""
        for name in self:
            self[name]

    def blocks(self) -> Iterator[dict[str, Tensor]]:
        """Every block: a layer's tensors, or another tensor; all ranks have to go through all.

        On ranks but 0 they have the rank's rows only.
        """
        for names in self._names:
            yield {name: self[name] for name in names}


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


def interface_towards(host: str, port: int) -> str | None:
    """The network interface of this machine by which an address is reached; None where the system
    does not tell (Linux does)."""
    if host == LOOPBACK:
        return "lo" if sys.platform == "linux" else "lo0"
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # it has no address
                found = fcntl.ioctl(probe.fileno(), _ADDRESS_OF_INTERFACE, asked)[20:24]
                if socket.inet_ntoa(found) == own:
                    return name
    return None
