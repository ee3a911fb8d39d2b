"""The weight store of a cluster: versions as immutable buffers, which readers fetch by reference.

The learner puts each version as a few large buffers, plus one of changes (`changes.py`), and sends
readers the catalogue of its publications. Readers on one node share the buffers fetched there.
Buffers are lost with the process that published them: readers raise `OwnerLost`."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rhymeflow.core.types import Version
from rhymeflow.utils import objects
from rhymeflow.utils.objects import Reference
from rhymeflow.weights.base import (
    BytesOf,
    ObjectWeightHandle,
    RowsSource,
    Update,
    VersionUnavailable,
    WeightReader,
)
from rhymeflow.weights.changes import Link, chain, copied, whole_in
from rhymeflow.weights.manifest import Manifest, TensorSpec, slot_bytes
from rhymeflow.weights.proof import ProvedWeights
from rhymeflow.weights.publish import New, WeightStore

if TYPE_CHECKING:
    from rhymeflow.learner.ranks import Ranks

QUESTION = "weights"  # the name under which a reader asks the learner for the catalogue

PART_BYTES = 1 << 28
"""Least size of a part, except the last: few references, and memory for one part at a time."""

WHOLE_VERSIONS = 2  # number of newest versions that are kept whole


class PublishedVersion(NamedTuple):
    """What readers can fetch of one version."""

    weights: ProvedWeights
    digests: list[int]
    parts: tuple[Reference, ...] | None  # none: the whole version is no longer kept
    changes: Link
    """Changes from the previous publication to this one; `Link.buffer` is a `Reference`."""


Catalogue = tuple[PublishedVersion, ...]  # versions in the order of publication


class ObjectWeightStore(WeightStore):
    """The learner's side; see `WeightStore`."""

    def __init__(self, manifest: Manifest, *, keep: int, ranks: Ranks | None = None) -> None:
        super().__init__(manifest, keep, ranks)
        self._objects, self._starts = objects.here(), _starts(self._rows)
        self._sizes = np.diff([*self._starts, slot_bytes(self._rows)]).tolist()
        self.handle = ObjectWeightHandle(self._objects.name, self._rows)
        self._catalogue: Catalogue = ()  # replaced, never changed: another thread reads it
        self._objects.offer(QUESTION, lambda: self._catalogue)

    def _begin(self) -> tuple[BytesOf, BytesOf]:
        self._parts: list[Reference] = []
        self._buffer = np.zeros(max(self._sizes), np.uint8)
        parts = self._catalogue[-1].parts if self._catalogue and self._keep else None
        old = dict(enumerate(self._objects.get(parts or ())))
        return partial(_bytes_of, self._starts, old), self._room

    def _room(self, spec: TensorSpec) -> np.ndarray:
        if (part := _part_of(self._starts, spec)) > len(self._parts):
            self._put_part()
        at = spec.offset - self._starts[part]
        return self._buffer[at : at + spec.num_bytes]

    def _put_part(self) -> None:
        self._parts.append(self._objects.put(self._buffer[: self._sizes[len(self._parts)]]))

    def _end(self, new: New) -> None:
        buffer = None if new.base is None else self._objects.put(np.concatenate(new.changes))
        link = Link(new.weights, new.base, sum(map(len, new.changes)), buffer)
        self._put_part()
        del self._buffer  # as large as a part
        self._add(PublishedVersion(new.weights, new.digests, tuple(self._parts), link))

    def close(self) -> None:
        """Release the buffers; readers keep what they have fetched."""
        self._catalogue = ()

    def _add(self, new: PublishedVersion) -> None:
        published = (*self._catalogue, new)[-max(self._keep, WHOLE_VERSIONS) :]
        self._catalogue = tuple(
            each._replace(
                parts=each.parts if age < WHOLE_VERSIONS else None,
                changes=each.changes if age < self._keep else Link(each.weights, None, 0, None),
            )
            for age, each in zip(reversed(range(len(published))), published, strict=True)
        )


class ObjectWeightReader(WeightReader):
    """One puller's side."""

    def __init__(self, handle: ObjectWeightHandle) -> None:
        super().__init__(handle)
        self._objects, self._owner = objects.here(), handle.owner
        self._starts = _starts(handle.manifest)

    def _fetch(self, have: ProvedWeights | None, want: Version | None) -> Update:
        catalogue: Catalogue = self._objects.ask(self._owner, QUESTION)
        wanted = [n for n, p in enumerate(catalogue) if want is None or p.weights.version == want]
        if not wanted:
            whole = [each.weights.version for each in catalogue if each.parts is not None]
            raise VersionUnavailable(f"the learner does not hold version {want}; it holds {whole}")
        publication, newest_first = catalogue[wanted[-1]], catalogue[wanted[-1] :: -1]
        changes = (each.changes for each in newest_first)
        links = None if have is None else chain(self.manifest, changes, have)
        steps, whole_names = None, {spec.name for spec in self.manifest}
        if links is not None:
            buffers = self._objects.get([link.buffer for link in links])
            steps = copied(self.manifest, buffers)
            whole_names = whole_in(steps)
        if whole_names and publication.parts is None:
            raise VersionUnavailable(f"the learner does not keep version {want} whole")
        parts = self._get(publication.parts or (), whole_names)
        digests, bytes_of = publication.digests, partial(_bytes_of, self._starts, parts)
        source = RowsSource(self.manifest, bytes_of, steps)
        return Update(self.manifest, publication.weights, lambda: list(digests), [source])

    def _get(self, parts: tuple[Reference, ...], names: set[str]) -> dict[int, np.ndarray]:
        needed = {_part_of(self._starts, each) for each in self.manifest if each.name in names}
        return dict(zip(needed, self._objects.get([parts[n] for n in needed]), strict=True))


def _starts(manifest: Manifest) -> list[int]:
    """Return the byte offsets of parts, which end at the first tensor past `PART_BYTES`."""
    starts = [0]
    for spec in manifest:
        if spec.num_bytes and spec.offset - starts[-1] >= PART_BYTES:
            starts.append(spec.offset)
    return starts


def _part_of(starts: list[int], spec: TensorSpec) -> int:
    return bisect(starts, spec.offset) - 1


def _bytes_of(starts: list[int], parts: Mapping[int, np.ndarray], spec: TensorSpec) -> np.ndarray:
    part = _part_of(starts, spec)
    at = spec.offset - starts[part]
    return parts[part][at : at + spec.num_bytes]
