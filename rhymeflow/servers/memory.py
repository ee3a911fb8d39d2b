"""The parameter server's piece of shared memory: two slots and the words that say which is whole.

    header   one cache line: magic, number of the last publication (0: none yet)
    slot     begun, ended, version, checksum, one digest per tensor; then the tensors' bytes
    slot

Holds true:
- publication n lies in slot n % 2, so writing n + 1 leaves n untouched;
- a slot holds publication n whole if begun == ended == n; a writer sets `begun` before it touches
  a byte and `ended` after the last, and only then the header's number;
- each word is one aligned 8-byte store, so it is read old or new, never half;
- the memory belongs to the process that created it: it is freed when that process says so, or by
  the interpreter's resource tracker when that process dies.

The memory is mapped directly rather than through `multiprocessing.shared_memory`: before Python
3.13 that class hands memory which a process merely attached to over to that process's resource
tracker, which frees it when the process ends.

Knows nothing of tensors' meaning, and takes no locks.
"""

from __future__ import annotations

import mmap
import os
import secrets
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np

from rhymeflow.errors import UserError
from rhymeflow.servers.layout import Layout, TensorSpec, slot_bytes

_DIRECTORY = Path("/dev/shm")  # where Linux shows POSIX shared memory as files
_MAGIC = 0x52484D464C4F5731  # "RHMFLOW1": the last digit is this arrangement's version
_TRACKED_AS = "shared_memory"  # the resource tracker's word for it
_LINE = 64
_WORD = 8
_SLOT_WORDS = 4


@dataclass(frozen=True, slots=True)
class ParameterHandle:
    """What another process needs to reach the weights; passed by value."""

    name: str
    layout: Layout


class Slot:
    """One copy of all tensors, with the words about it."""

    def __init__(self, words: np.ndarray, data: np.ndarray) -> None:
        self._words = words
        self._data = data

    @property
    def begun(self) -> int:
        """Publication that was last begun here."""
        return int(self._words[0])

    @property
    def ended(self) -> int:
        """Publication that was last completed here."""
        return int(self._words[1])

    @property
    def version(self) -> int:
        """The weights' version."""
        return int(self._words[2])

    @property
    def checksum(self) -> int:
        """What proves a copy of all tensors."""
        return int(self._words[3])

    def bytes_of(self, spec: TensorSpec) -> np.ndarray:
        """The tensor's bytes, in place."""
        return self._data[spec.offset : spec.offset + spec.num_bytes]

    def begin(self, publication: int) -> None:
        """Say that the slot is being written: what it held is gone."""
        self._words[0] = publication

    def end(self, version: int, checksum: int, digests: list[int]) -> None:
        """Say that the slot is whole."""
        self._words[2] = version
        self._words[3] = checksum
        self._words[_SLOT_WORDS:] = np.array(digests, np.uint64)
        self._words[1] = self._words[0]

    def digests(self) -> list[int]:
        """Each tensor's checksum, in the layout's order."""
        return [int(word) for word in self._words[_SLOT_WORDS:]]


class Memory:
    """The mapped memory. `create` makes it, `attach` maps what another process made."""

    def __init__(self, handle: ParameterHandle, buffer: mmap.mmap) -> None:
        self.handle = handle
        whole = np.frombuffer(buffer, np.uint8)
        self._header = whole[:_LINE].view(np.uint64)
        num_words = _SLOT_WORDS + len(handle.layout)
        self._slots = []
        for start, end in _slot_ranges(handle.layout):
            data_start = start + _lines(num_words * _WORD)
            words = whole[start : start + num_words * _WORD].view(np.uint64)
            self._slots.append(Slot(words, whole[data_start:end]))

    @property
    def published(self) -> int:
        """Number of the last publication, 0 before the first."""
        return int(self._header[1])

    def slot(self, publication: int) -> Slot:
        """The slot in which this publication lies, if it lies anywhere."""
        return self._slots[publication % 2]

    def publish(self, publication: int) -> None:
        """Make this publication the one that readers take."""
        self._header[1] = publication

    def stamp(self) -> None:
        """Mark new memory as ours."""
        self._header[0] = _MAGIC

    def is_stamped(self) -> bool:
        """Whether this is memory that `stamp` marked."""
        return int(self._header[0]) == _MAGIC


def create(layout: Layout) -> Memory:
    """Make shared memory for two copies of the layout, with nothing published.

    Raises:
        UserError: the machine's shared memory is too small. Were it not reserved here, the first
            write past its end would kill the process with SIGBUS.
    """
    size = _slot_ranges(layout)[-1][1]
    handle = ParameterHandle(f"rhymeflow-{os.getpid()}-{secrets.token_hex(4)}", layout)
    path = path_of(handle)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        resource_tracker.register(f"/{handle.name}", _TRACKED_AS)
        os.posix_fallocate(descriptor, 0, size)
        memory = Memory(handle, mmap.mmap(descriptor, size, mmap.MAP_SHARED))
    except OSError as error:
        free(handle)
        raise UserError(
            f"{_DIRECTORY} has no room for two copies of the weights ({size / 2**20:.0f} MiB): "
            f"{error.strerror}; for a container, --shm-size sets it"
        ) from error
    finally:
        os.close(descriptor)
    memory.stamp()
    return memory


def free(handle: ParameterHandle) -> None:
    """Remove the name; the memory goes when the last process that mapped it does."""
    path_of(handle).unlink()
    resource_tracker.unregister(f"/{handle.name}", _TRACKED_AS)


def attach(handle: ParameterHandle, *, writable: bool) -> Memory:
    """Map memory that another process created.

    Raises:
        FileNotFoundError: the creator is gone.
    """
    descriptor = os.open(path_of(handle), os.O_RDWR if writable else os.O_RDONLY)
    try:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        buffer = mmap.mmap(descriptor, 0, mmap.MAP_SHARED, protection)
    finally:
        os.close(descriptor)
    memory = Memory(handle, buffer)
    assert memory.is_stamped(), f"{handle.name} is no parameter server of this Rhymeflow"
    return memory


def path_of(handle: ParameterHandle) -> Path:
    """The file that stands for the memory."""
    return _DIRECTORY / handle.name


def _lines(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE


def _slot_ranges(layout: Layout) -> list[tuple[int, int]]:
    """Start and end of each slot in bytes."""
    size = _lines((_SLOT_WORDS + len(layout)) * _WORD) + slot_bytes(layout)
    return [(_LINE, _LINE + size), (_LINE + size, _LINE + 2 * size)]
