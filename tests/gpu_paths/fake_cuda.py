"""Makes torch's CPU build accept tensors of CUDA devices, for as long as `fake_cuda` is entered.

Two kinds of tensors use it: fake ones, which have shapes only (`FakeTensorMode`), and those of
`simcuda.py`, which are computed on the CPU. Views, conversions and autograd ask `cuda_guard.cpp`
for the current GPU and its streams. Backward passes run in the caller's thread."""

# torch asks a C++ object with some twenty virtual functions, at places in its table that differ
# between versions; docs/decisions.md says what could be had without a compiler.

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

TORCH = Path(torch.__file__).parent
SOURCE = Path(__file__).with_name("cuda_guard.cpp")


def compiled(directory: Path) -> Path:
    """The library of `cuda_guard.cpp`, made in `directory` unless it is there."""
    library = directory / "cuda_guard.so"
    if not library.exists():
        made = library.with_suffix(f".{id(directory)}")
        command = ["g++", "-std=c++20", "-O0", "-fPIC", "-shared", SOURCE, "-o", made]
        libraries = [f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
        subprocess.run([*command, f"-I{TORCH / 'include'}", *libraries], check=True)
        made.rename(library)  # whole, whoever else compiles
    return library


class Stream:
    """A stream that is always done. `waited` is called when the host waits, `ordered` when a stream
    does, for an event."""

    stream_id = device_index = cuda_stream = 0
    waited = staticmethod(lambda what: None)
    ordered = staticmethod(lambda: None)
    is_beside = False  # whether what is queued is of a stream that is not the default

    def __init__(self, *_: object, **__: object) -> None:
        self.device = torch.device("cuda", 0)

    def synchronize(self) -> None:
        Stream.waited("synchronize")

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def wait_event(self, event: Event) -> None:
        Stream.ordered()

    def wait_stream(self, other: Stream) -> None:
        """Of those that are beside, for the default: what it was told is done."""


@contextmanager
def beside(stream: Stream | None) -> Iterator[None]:
    """As `torch.cuda.stream`."""
    before, Stream.is_beside = Stream.is_beside, Stream.is_beside or stream is not None
    try:
        yield
    finally:
        Stream.is_beside = before


class Event(Stream):
    """For one that was never recorded the host does not wait, as on a GPU."""

    is_recorded = False

    def record(self, stream: Stream | None = None) -> None:
        self.is_recorded = True

    def synchronize(self) -> None:
        if self.is_recorded:
            super().synchronize()


@contextmanager
def fake_cuda(library: Path) -> Iterator[None]:
    """`library`: see `compiled`."""
    guard = ctypes.CDLL(str(library))
    said = {
        "is_available": True, "is_initialized": True, "is_bf16_supported": True, "device_count": 8,
        "is_current_stream_capturing": False, "current_device": 0, "set_device": None,
        "get_device_capability": (9, 0), "get_device_name": "a simulated GPU", "_lazy_init": None,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, torch.autograd.set_multithreading_enabled(False):
        for name, value in said.items():
            patch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)
        for name in ("Stream", "current_stream", "default_stream"):
            patch.setattr(torch.cuda, name, Stream)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "stream", beside)
        patch.setattr(torch.cuda, "synchronize", lambda *_: Stream.waited("synchronize"))
        patch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
        patch.setattr(torch.Tensor, "cuda", lambda self, *_, **__: self.to("cuda"))
        guard.install()
        lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            yield
        finally:
            torch._C._set_only_lift_cpu_tensors(lifts)
            guard.uninstall()
