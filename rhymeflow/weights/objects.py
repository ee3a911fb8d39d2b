"""The weight store of a cluster: versions as immutable buffers, which readers get by reference.

The learner puts each version as a few large buffers, and with differences (`changes.py`) one more
that has what changed since the version before. It answers readers with the catalogue of what it has
published, in which the references are. A reader fetches what it needs in the background; readers on
one node share what was fetched there, and keep it for as long as they like.

Buffers go with the process that published them: a reader then raises `StoreLost` before it has
brought anything, and the next learner's store has the version that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from rhymeflow.core.types import Version
from rhymeflow.utils import objects
from rhymeflow.utils.objects import Reference
from rhymeflow.weights.base import (
    BytesOf,
    ObjectWeightHandle,
    StoreLost,
    Update,
    VersionUnavailable,
    WeightReader,
    WeightStore,
)
from rhymeflow.weights.changes import Link, chain, copied, whole_in
from rhymeflow.weights.manifest import Manifest, TensorSpec
from rhymeflow.weights.proof import Pulled

QUESTION = "weights"
"""What a reader asks the learner for: the catalogue."""

PART_BYTES = 1 << 28
"""A part has at least this much, if there is so much: few references, and little memory besides."""

WHOLE_VERSIONS = 2
"""The newest ones, of which all of the weights are kept."""


class Part(NamedTuple):
    """Bytes `start` to `end` of a version's layout: some of its tensors, whole."""

    start: int
    end: int
    reference: Reference


class Publication(NamedTuple):
    """What can be had of one version."""

    made: Pulled
    digests: list[int]
    parts: tuple[Part, ...] | None
    """None: the whole version is not kept any more."""
    changes: Link
    """Since the publication before; its buffer is a reference."""


Catalogue = tuple[Publication, ...]
"""In the order in which they were published."""


class ObjectWeightStore(WeightStore):
    """The learner's side. `keep`: how many differences to keep; 0: none is made."""

    def __init__(self, manifest: Manifest, *, keep: int) -> None:
        super().__init__(manifest, keep)
        self._objects = objects.here()
        self.handle = ObjectWeightHandle(self._objects.name, manifest)
        self._catalogue: Catalogue = ()  # replaced, never changed: it is read by another thread
        self._objects.offer(QUESTION, lambda: self._catalogue)

    def _begin(self) -> tuple[BytesOf, Callable[[TensorSpec, np.ndarray], None]]:
        self._writer = _Writer(self._objects, self._manifest)
        parts = self._catalogue[-1].parts if self._catalogue and self._keep else None
        buffers = self._objects.get([part.reference for part in parts or ()])
        return _Here(parts or (), buffers).bytes_of, self._writer.put

    def _end(
        self, made: Pulled, digests: list[int], base: Pulled | None, changes: Sequence[np.ndarray]
    ) -> None:
        link = Link(made, None, 0, None)
        if base is not None:
            link = Link(
                made, base, sum(map(len, changes)), self._objects.put(np.concatenate(changes))
            )
        self._enter(Publication(made, digests, self._writer.end(), link))

    def close(self) -> None:
        """Let go of the buffers; readers keep what they have."""
        self._catalogue = ()

    def _enter(self, new: Publication) -> None:
        published = (*self._catalogue, new)[-max(self._keep, WHOLE_VERSIONS) :]
        self._catalogue = tuple(
            each._replace(
                parts=each.parts if age < WHOLE_VERSIONS else None,
                changes=each.changes if age < self._keep else Link(each.made, None, 0, None),
            )
            for age, each in zip(reversed(range(len(published))), published, strict=True)
        )


class ObjectWeightReader(WeightReader):
    """One puller's side."""

    def __init__(self, handle: ObjectWeightHandle) -> None:
        """Does not ask for anything yet."""
        super().__init__(handle)
        self._objects, self._owner = objects.here(), handle.owner

    @property
    def version(self) -> Version | None:
        """See `base.WeightReader`."""
        catalogue = self._ask()
        return catalogue[-1].made.version if catalogue else None

    def _fetch(self, have: Pulled | None, want: Version | None) -> Update:
        catalogue = self._ask()
        wanted = [n for n, p in enumerate(catalogue) if want is None or p.made.version == want]
        if not wanted:
            held = [each.made.version for each in catalogue if each.parts is not None]
            raise VersionUnavailable(f"the learner does not hold version {want}; it holds {held}")
        publication, newest_first = catalogue[wanted[-1]], catalogue[wanted[-1] :: -1]
        changes = (each.changes for each in newest_first)
        links = None if have is None else chain(self.manifest, changes, have)
        steps, names = None, {spec.name for spec in self.manifest}
        with _lost_with(self._owner):
            if links is not None:
                buffers = self._objects.get([link.buffer for link in links])
                steps = copied(self.manifest, buffers)
                names = whole_in(steps)
            if names and publication.parts is None:
                raise VersionUnavailable(f"the learner does not keep version {want} whole")
            here = self._get(publication.parts or (), names)
        digests = publication.digests
        made = publication.made
        return Update(self.manifest, made, lambda: list(digests), here.bytes_of, steps)

    def _get(self, parts: tuple[Part, ...], names: set[str]) -> _Here:
        needed = [spec for spec in self.manifest if spec.name in names and spec.num_bytes]
        chosen = tuple(
            part for part in parts if any(part.start <= spec.offset < part.end for spec in needed)
        )
        return _Here(chosen, self._objects.get([part.reference for part in chosen]))

    def _ask(self) -> Catalogue:
        with _lost_with(self._owner):
            found: Catalogue = self._objects.ask(self._owner, QUESTION)
        return found


class _Writer:
    def __init__(self, store: objects.Objects, manifest: Manifest) -> None:
        self._store, self._parts = store, list[Part]()
        self._ranges = _ranges(manifest)
        largest = max((end - start for start, end in self._ranges), default=0)
        self._buffer = np.zeros(largest, np.uint8)

    def put(self, spec: TensorSpec, source: np.ndarray) -> None:
        if not spec.num_bytes:
            return
        if spec.offset >= self._ranges[len(self._parts)][1]:
            self._flush()
        at = spec.offset - self._ranges[len(self._parts)][0]
        self._buffer[at : at + spec.num_bytes] = source

    def end(self) -> tuple[Part, ...]:
        if self._ranges:
            self._flush()
        return tuple(self._parts)

    def _flush(self) -> None:
        start, end = self._ranges[len(self._parts)]
        self._parts.append(Part(start, end, self._store.put(self._buffer[: end - start])))


class _Here(NamedTuple):
    """Parts of a publication that are on this node, with their bytes."""

    parts: tuple[Part, ...]
    buffers: list[np.ndarray]

    def bytes_of(self, spec: TensorSpec) -> np.ndarray:
        """The tensor's bytes, in place."""
        if not spec.num_bytes:
            return np.empty(0, np.uint8)
        for part, buffer in zip(self.parts, self.buffers, strict=True):
            if part.start <= spec.offset < part.end:
                at = spec.offset - part.start
                return buffer[at : at + spec.num_bytes]
        raise LookupError(f"{spec.name} was not fetched")


def _ranges(manifest: Manifest) -> list[tuple[int, int]]:
    """Where parts begin and end: at tensors, each as large as it must be and hardly larger."""
    found: list[tuple[int, int]] = []
    for spec in (each for each in manifest if each.num_bytes):
        end = spec.offset + spec.num_bytes
        if found and found[-1][1] - found[-1][0] < PART_BYTES:
            found[-1] = found[-1][0], end
        else:
            found.append((spec.offset, end))
    return found


@contextmanager
def _lost_with(owner: str) -> Iterator[None]:
    try:
        yield
    except objects.OwnerLost as error:
        raise StoreLost(f"{owner}, which published the weights, is gone: {error}") from None
