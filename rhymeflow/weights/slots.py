"""The weight store's shared memory: two slots and the words that say which is whole.

    header   one cache line: magic, number of the last publication (0: none yet)
    slot     begun, ended, version, checksum, one digest per tensor; then the tensors' bytes
    slot

Holds true:
- publication n lies in slot n % 2, so writing n + 1 leaves n untouched;
- a slot holds publication n whole if begun == ended == n; a writer sets `begun` before it touches
  a byte and `ended` after the last, and only then the header's number;
- each word is one aligned 8-byte store, so it is read old or new, never half.

Knows nothing of tensors' meaning, and takes no locks.
"""

from __future__ import annotations

import mmap

import numpy as np

from rhymeflow.utils import shared_memory
from rhymeflow.weights.handle import SharedMemoryWeightHandle
from rhymeflow.weights.manifest import Manifest, TensorSpec, slot_bytes

_MAGIC = 0x52484D464C4F5731  # "RHMFLOW1": the last digit is this arrangement's version
_WORD = 8
_SLOT_WORDS = 4


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
        """Each tensor's checksum, in the manifest's order."""
        return [int(word) for word in self._words[_SLOT_WORDS:]]


class Memory:
    """The mapped memory. `create` allocates it, `attach` maps what another process allocated."""

    def __init__(self, handle: SharedMemoryWeightHandle, buffer: mmap.mmap) -> None:
        self.handle = handle
        whole = np.frombuffer(buffer, np.uint8)
        self._header = whole[: shared_memory.LINE].view(np.uint64)
        num_words = _SLOT_WORDS + len(handle.manifest)
        self._slots = []
        for start, end in _slot_ranges(handle.manifest):
            data_start = start + shared_memory.whole_lines(num_words * _WORD)
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


def create(manifest: Manifest, prefix: str = "rhymeflow") -> Memory:
    """Make shared memory for two copies of the manifest, with nothing published.

    `prefix`: of its name.

    Raises:
        UserError: the machine's shared memory is too small.
    """
    handle = SharedMemoryWeightHandle(shared_memory.new_name(prefix), manifest)
    buffer = shared_memory.create(
        handle.name,
        _slot_ranges(manifest)[-1][1],
        what="two copies of the weights",
        advice="for a container, --shm-size sets it",
    )
    memory = Memory(handle, buffer)
    memory.stamp()
    return memory


def attach(handle: SharedMemoryWeightHandle, *, writable: bool) -> Memory:
    """Map memory that another process created.

    Raises:
        FileNotFoundError: the creator is gone.
    """
    memory = Memory(handle, shared_memory.attach(handle.name, writable=writable))
    assert memory.is_stamped(), f"{handle.name} is no weight store of this Rhymeflow"
    return memory


def _slot_ranges(manifest: Manifest) -> list[tuple[int, int]]:
    """Start and end of each slot in bytes."""
    size = shared_memory.whole_lines((_SLOT_WORDS + len(manifest)) * _WORD) + slot_bytes(manifest)
    return [
        (shared_memory.LINE, shared_memory.LINE + size),
        (shared_memory.LINE + size, shared_memory.LINE + 2 * size),
    ]
