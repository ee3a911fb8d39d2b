"""The weight store that also knows what changed from each version to the next.

It is the store of `shared_memory.py`, two slots with a whole version each, so a puller that has
nothing, or something too old, pulls as before. Beside them lie the changes from each publication to
the next (`changes.py`), each in memory of its own; the oldest go when there are more than `keep`.

Holds true:
- all that is true of the two slots;
- weights that were updated are, to the last bit, those that a whole pull would have brought, and
  are proved by the same checksum;
- changes are put only into the very weights that they were found against, which version and
  checksum name: a learner that is restarted publishes its version again, and where that came out
  different (on GPUs it may), instances pull it whole;
- changes are never written over: memory that is freed while somebody reads it stays until he is
  done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from rhymeflow.core.types import Version
from rhymeflow.utils import shared_memory
from rhymeflow.weights import slots
from rhymeflow.weights.base import Pulled, TensorChunk, Update
from rhymeflow.weights.changes import Changes, Finder, Found, pack, shares
from rhymeflow.weights.handle import DeltaWeightHandle, SharedMemoryWeightHandle
from rhymeflow.weights.manifest import Manifest, TensorSpec
from rhymeflow.weights.shared_memory import Pull, SharedMemoryWeightReader, SharedMemoryWeightStore
from rhymeflow.weights.slots import Memory, Slot


class DeltaWeightStore(SharedMemoryWeightStore):
    """The writing side; of its kind the only one that writes this memory."""

    def __init__(self, mapped: Memory, *, keep: int) -> None:
        """Use `make`."""
        super().__init__(mapped, is_owner=True)
        self._keep = keep
        self._kept: dict[int, str] = {}
        """Names of the memory of changes, by publication."""
        self._finder = Finder(mapped.handle.manifest)
        self._previous: Slot | None = None
        self._found: list[Found] = []
        self._metrics: dict[str, float] = {}

    @classmethod
    def make(cls, manifest: Manifest, *, keep: int, prefix: str = "rhymeflow") -> DeltaWeightStore:
        """Make shared memory for two copies of the weights, with nothing published.

        The changes to the last `keep` publications are kept; all names begin with `prefix`.

        Raises:
            UserError: the machine has too little shared memory; `publish` may find that, too.
        """
        return cls(slots.create(manifest, prefix), keep=keep)

    @property
    def handle(self) -> DeltaWeightHandle:
        """What `DeltaWeightReader` takes, in any process of this machine."""
        return DeltaWeightHandle(self._memory.handle)

    @property
    def metrics(self) -> Mapping[str, float]:
        """How much changed, and what that takes, each as a share of the weights."""
        return self._metrics

    def close(self) -> None:
        """Give the memory back; readers keep what they have mapped."""
        for publication in list(self._kept):
            shared_memory.free(self._kept.pop(publication))
        super().close()

    def _begin(self, publication: int) -> Slot:
        before = publication - 1
        self._previous = self._memory.slot(before) if before else None
        self._found = []
        return super()._begin(publication)

    def _put(self, slot: Slot, spec: TensorSpec, source: np.ndarray) -> int:
        if self._previous is not None:
            self._found.append(self._finder.find(source, self._previous.bytes_of(spec)))
        return super()._put(slot, spec, source)

    def _complete(self, publication: int, made: Pulled, digests: list[int]) -> None:
        if self._previous is None:
            return
        base = Pulled(self._previous.version, self._previous.checksum)
        size, parts = pack(base, made, digests, self._found)
        name = _name(self._memory.handle, publication)
        what, advice = "what changed in the weights", "weights.transport: shared_memory needs none"
        buffer = np.frombuffer(shared_memory.create(name, size, what=what, advice=advice), np.uint8)
        start = 0
        for part in parts:
            buffer[start : start + len(part)] = part
            start += len(part)
        self._kept[publication] = name
        while len(self._kept) > self._keep:
            shared_memory.free(self._kept.pop(min(self._kept)))
        self._metrics = shares(self._memory.handle.manifest, self._found, size)
        self._found = []


class DeltaWeightReader(SharedMemoryWeightReader):
    """The reading side, in any process of this machine; cannot write. A `base.WeightReader`."""

    def __init__(self, handle: DeltaWeightHandle) -> None:
        """Map the memory; `DeltaWeightHandle.open` says what it raises."""
        super().__init__(handle.memory)
        self._handle = handle
        self._executor = ThreadPoolExecutor(1, "weights")
        self._fetched: tuple[Pulled, Version | None, Future[_Chain | None]] | None = None

    @property
    def handle(self) -> DeltaWeightHandle:
        """How another process opens its own."""
        return self._handle

    def prepare(self, have: Pulled | None, want: Version) -> bool:
        """Copy the changes that are needed into this process; see `base.WeightReader`."""
        if have is None:
            return True
        if self._fetched is None or self._fetched[:2] != (have, want):
            self._fetched = have, want, self._executor.submit(self._fetch, have, want)
        return self._fetched[2].done()

    def changes(self, have: Pulled, want: Version | None) -> Update | None:
        """The listed changes since `have`, and tensors that changed too much whole."""
        if self._fetched is not None and self._fetched[:2] == (have, want):
            chain = self._fetched[2].result()
        else:
            chain = self._fetch(have, want)
        self._fetched = None
        if chain is None:
            return None
        publication, steps = chain
        if not steps:
            self._pulling = Pull(publication, have, None)
            return Update((), iter(()))
        last, whole = steps[-1], set().union(*(step.whole for step in steps))
        slot = self._memory.slot(publication)
        if whole and not slot.begun == slot.ended == publication:
            return None
        self._pulling = Pull(publication, last.made, None if whole else last.digests)
        listed = (
            {name: each for name, each in step.listed.items() if name not in whole}
            for step in steps
        )
        return Update(tuple(listed), self._chunks(slot, whole))

    def _chunks(self, slot: Slot, names: set[str]) -> Iterator[TensorChunk]:
        for spec in self.manifest:
            if spec.name in names:
                yield TensorChunk(spec.name, 0, slot.bytes_of(spec))

    def _fetch(self, have: Pulled, want: Version | None) -> _Chain | None:
        """Copies of the changes that lead from `have` to `want`, in order.

        None where one of them is gone, or all are larger than the weights.
        """
        steps: list[Changes] = []
        last, left = 0, sum(spec.num_bytes for spec in self.manifest)
        for publication in range(self._memory.published, 0, -1):
            found = self._open(publication)
            if found is None:
                return None
            if not steps and want is not None and found.made.version != want:
                continue  # newer
            last = last or publication
            if found.made == have:
                return last, []
            left -= found.buffer.nbytes
            if left < 0:
                return None
            step = Changes(self.manifest, found.buffer.copy())
            step.listed  # noqa: B018 - is made now, not while the puller waits for it
            steps.append(step)
            if found.base == have:
                return last, steps[::-1]
        return None

    def _open(self, publication: int) -> Changes | None:
        """The changes that made this publication, in place; None if they are gone."""
        try:
            mapped = shared_memory.attach(_name(self._memory.handle, publication), writable=False)
        except FileNotFoundError:
            return None
        return Changes(self.manifest, np.frombuffer(mapped, np.uint8))


_Chain = tuple[int, list[Changes]]
"""The publication that is reached, and the steps that lead there."""


def _name(handle: SharedMemoryWeightHandle, publication: int) -> str:
    """Name of the memory of the changes that made this publication."""
    return f"{handle.name}.{publication % 10_000}"


__all__ = ["DeltaWeightReader", "DeltaWeightStore"]
