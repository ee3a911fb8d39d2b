"""A CUDA device that is this CPU: its tensors say `cuda`, are computed on the CPU, and have values.

What a GPU refuses is refused: a CPU tensor beside a `cuda` one, and `.numpy()`. Counted by the line
of the package that caused it are kernels (operations that compute something), copies each way with
their bytes, and what the host waits for. A copy from or to pinned memory with `non_blocking` is
made only when the host waits, or the device tensor is used: who does not wait reads old values.
Those of another stream read what is there then, unless the device waits for them before."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu_paths.fake_cuda import Stream, fake_cuda

aten = torch.ops.aten
ROOT = f"{Path(__file__).parents[2]}/"  # which may hold the environment, too
CPU = torch.device("cpu")
WAITING = {
    aten._local_scalar_dense, aten._unique2, aten.bincount, aten.equal, aten.is_nonzero,
    aten.masked_select, aten.nonzero, aten.unique_consecutive, aten.unique_dim,
}  # fmt: skip
"""Operations whose result, or its size, the host must know."""
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
COPYING = {aten._to_copy, aten.copy_}
FREE = {
    aten._fused_sdp_choice, aten._local_scalar_dense, aten.detach, aten.empty, aten.empty_like,
    aten.empty_strided, aten.lift_fresh, aten.new_empty, aten.new_empty_strided,
}  # fmt: skip
"""Operations, besides views, that launch no kernel of their own."""

WITHOUT_CPU_KERNEL = {
    aten.mm.dtype: lambda a, b, dtype: a.to(dtype) @ b.to(dtype),
    aten.histc.default: lambda x, *how: aten.histc.default(x.double(), *how).to(x.dtype),
}


class CudaTensor(Tensor):
    """A tensor of a simulated device; `inner` has its values, on the CPU."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, index: int = 0) -> CudaTensor:
        made = Tensor._make_wrapper_subclass(
            cls, inner.size(), inner.stride(), inner.storage_offset(),
            dtype=inner.dtype, device=torch.device("cuda", index),
        )  # fmt: skip
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        assert SimCuda.current is not None, "a simulated tensor is used outside of its simulation"
        return SimCuda.current.run(function, arguments, keywords or {})

    def __tensor_flatten__(self):  # makes `Module.to` swap parameters, so tied ones stay tied
        return ["inner"], self.device.index

    @staticmethod
    def __tensor_unflatten__(parts, index, size, stride):
        return CudaTensor(parts["inner"], index)

    def __deepcopy__(self, memo: dict) -> Tensor:
        if id(self) not in memo:
            new = self.detach().clone()
            is_parameter = isinstance(self, nn.Parameter)
            memo[id(self)] = nn.Parameter(new, self.requires_grad) if is_parameter else new
        return memo[id(self)]

    def tolist(self) -> list:
        return self.cpu().tolist()

    def numpy(self, *_: object, **__: object) -> None:
        raise TypeError("can't convert cuda:0 device type tensor to numpy: use Tensor.cpu() first")

    __array__ = numpy

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: CudaTensor) -> None:
        Tensor.data.__set__(self, value)
        self.inner = value.inner


def tensors_in(value: Any) -> list[Tensor]:
    """Those among arguments, or in their lists."""
    if isinstance(value, Tensor):
        return [value]
    parts = value if isinstance(value, tuple | list) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Arguments or results with each tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(mapped(change, part) for part in value)
    return value


def on_cpu(tensor: Tensor) -> Tensor:
    return tensor.inner if isinstance(tensor, CudaTensor) else tensor


@cache
def traits(function: torch._ops.OpOverload) -> tuple[bool, bool]:
    """Whether an operation is composed of others, and whether it launches a kernel."""
    aliases = [each.alias_info for each in function._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    is_composed = function._can_decompose() and function is not aten.mm.dtype
    return is_composed, not is_view and function.overloadpacket not in FREE


def line_here() -> str:
    """The innermost line of the package that is being run; of a test, if there is none."""
    frame, of_test = sys._getframe(1), "?"
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(f"{ROOT}rhymeflow/"):
            return f"{file.removeprefix(ROOT)}:{frame.f_lineno}"
        if file.startswith(f"{ROOT}tests/") and file != __file__ and of_test == "?":
            of_test = f"{file.removeprefix(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return of_test


class SimCuda(TorchDispatchMode):
    """What a simulated device did: kernels and waits by line, copies by (direction, line), bytes
    by (direction, "pinned" or "pageable"), with directions "to device" and "to host"."""

    current: SimCuda | None = None

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.waits = Counter[str](), Counter[str]()
        self.copies, self.bytes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        self._pinned: list[torch.UntypedStorage] = []
        self._pending: list[tuple[Tensor, Tensor, bool]] = []
        """Targets and sources of queued copies, and whether they are of another stream."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and to skip it costs time

    def reset(self) -> None:
        """Count from 0."""
        for counter in (self.kernels, self.waits, self.copies, self.bytes):
            counter.clear()

    def num_copies(self, direction: str) -> int:
        return sum(count for (to, _), count in self.copies.items() if to == direction)

    def num_bytes(self, direction: str) -> int:
        return sum(count for (to, _), count in self.bytes.items() if to == direction)

    def pin(self, tensor: Tensor) -> Tensor:
        """Take the memory of this CPU tensor for pinned from now on."""
        self._pinned.append(tensor.untyped_storage())
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        place, is_ours = tensor.data_ptr(), isinstance(tensor, CudaTensor)
        return not is_ours and any(0 <= place - x.data_ptr() < x.nbytes() for x in self._pinned)

    def waited(self, what: str) -> None:
        """The host waits for the default stream: all that it has queued there is done."""
        self.waits[f"{line_here()} {what}"] += 1
        self._finish(lambda target, is_beside: not is_beside)

    def waited_for_all(self, what: str) -> None:
        """The host waits for an event or a stream; taken for all of them."""
        self.waited(what)
        self._finish()

    def _finish(self, which: Callable[[Tensor, bool], bool] = lambda *_: True) -> None:
        """Make the copies that are queued."""
        queued, self._pending = self._pending, []
        for target, source, is_beside in queued:
            if which(target, is_beside):
                target.copy_(source)
            else:
                self._pending.append((target, source, is_beside))

    def _finish_of(self, used: Iterable[Tensor]) -> None:
        """Make those to these device tensors."""
        places = {x.untyped_storage().data_ptr() for x in used}
        self._finish(lambda target, _: target.untyped_storage().data_ptr() in places)

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        return self.run(function, arguments, keywords or {})

    def run(self, function, arguments, keywords):
        """Run an operation whose arguments may be of the device, and count it."""
        leaves = tensors_in([*arguments, *keywords.values()])
        ours = [x for x in leaves if isinstance(x, CudaTensor)]
        device = keywords.get("device")
        device = None if device is None else torch.device(device)
        if keywords.pop("pin_memory", False):
            return self.pin(function(*arguments, **keywords))
        if not ours and (device is None or device.type != "cuda"):
            return function(*arguments, **keywords)
        is_composed, launches = traits(function)
        if is_composed:
            with self:
                return function.decompose(*arguments, **keywords)
        packet = function.overloadpacket
        if packet in COPYING:
            target, source = arguments[:2] if packet is aten.copy_ else (None, arguments[0])
            to = device if target is None else target.device
            is_number = target is not None and source.device == CPU and not source.dim()
            if to is not None and source.device.type != to.type and not is_number:
                return self._copy_between(source, target, arguments, keywords)
        self._check(packet, arguments, leaves, ours)
        self._finish_of(x.inner for x in ours)
        if packet in WAITING:
            self.waited(packet.__name__)
        if launches:
            self.kernels[line_here()] += 1
        return self._computed(function, arguments, keywords, device or ours[0].device, ours)

    def _computed(self, function, arguments, keywords, device: torch.device, ours):
        if "device" in keywords:
            keywords = {**keywords, "device": CPU}
        inner = mapped(on_cpu, tuple(arguments))
        named = {name: mapped(on_cpu, value) for name, value in keywords.items()}
        result = WITHOUT_CPU_KERNEL.get(function, function)(*inner, **named)
        if device.type == "cpu":
            return result
        # What is changed in place is returned as the tensor that it was.
        same = {id(x.inner): x for x in ours} if function._schema.is_mutable else {}
        index = device.index or 0
        return mapped(lambda x: same[id(x)] if id(x) in same else CudaTensor(x, index), result)

    def _check(self, packet, arguments, leaves, ours) -> None:
        """Raise as a GPU does for tensors on several devices; count what indices cost."""
        name = packet.__name__
        others = [x for x in leaves if not isinstance(x, CudaTensor) and x.dim()]
        indices = tensors_in(arguments[1]) if packet in INDEXING else []
        devices = {str(x.device) for x in ours}
        for x in others:
            if any(x is index for index in indices):
                self._count_copy("to device", x)
            else:
                devices.add(f"cpu {list(x.shape)}")
        if len(devices) > 1:
            raise RuntimeError(f"{name} of tensors on {sorted(devices)} at {line_here()}")
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            self.waited("boolean mask")

    def _count_copy(self, direction: str, host: Tensor) -> None:
        self.copies[direction, line_here()] += 1
        kind = "pinned" if self.is_pinned(host) else "pageable"
        self.bytes[direction, kind] += host.numel() * host.itemsize

    def _copy_between(self, source: Tensor, target: Tensor | None, arguments, keywords) -> Tensor:
        """Copy between host and device, into a new tensor if `target` is None; later, if the host
        goes on at once."""
        to_host = isinstance(source, CudaTensor)
        goes_on = keywords.get("non_blocking") or (target is not None and True in arguments[2:])
        if target is None:
            new = torch.empty_like(on_cpu(source), dtype=keywords.get("dtype") or source.dtype)
            if to_host and goes_on:
                self.pin(new)
            target = (
                new if to_host else CudaTensor(new, torch.device(keywords["device"]).index or 0)
            )
        host = target if to_host else source
        self._count_copy("to host" if to_host else "to device", host)
        self._finish_of([source.inner if to_host else target.inner])
        if goes_on and self.is_pinned(host):
            # What the device does next does not change what is read, unless the copy is beside it;
            # what the host does may.
            is_beside, source = Stream.is_beside, on_cpu(source)
            if to_host and not is_beside:
                source = source.clone()
            self._pending.append((on_cpu(target), source, is_beside))
            return target
        if to_host:
            self.waited("copy to host")
        on_cpu(target).copy_(on_cpu(source))
        return target


@contextmanager
def simulated_cuda(library: Path) -> Iterator[SimCuda]:
    """Simulate CUDA inside; `library` as in `fake_cuda`."""
    sim = SimCuda()
    with fake_cuda(library), pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimCuda, "current", sim)
        patch.setattr(Stream, "waited", staticmethod(sim.waited_for_all))
        patch.setattr(Stream, "ordered", staticmethod(sim._finish))
        patch.setattr(Tensor, "pin_memory", lambda self, *_: sim.pin(self.clone()))
        patch.setattr(Tensor, "is_pinned", lambda self, *_: sim.is_pinned(self))
        with sim:
            yield sim
