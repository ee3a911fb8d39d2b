"""The weight store of a cluster: versions as immutable buffers, which readers get by reference.

The learner puts each version as a few large buffers, and with differences (`changes.py`) one more
that has what changed since the version before. It answers readers with the catalogue of what it has
published, in which the references are. A reader fetches what it needs in the background; readers on
one node share what was fetched there.

Holds true:
- a pull neither waits for a publication nor holds one up, and nothing is ever written over: a
  reader keeps what it is fetching for as long as it likes;
- weights that were updated are those that a whole pull would have brought, to the last bit, and
  every pull is proved by the same checksum (law 5);
- buffers go with the process that published them: a reader then raises `StoreLost` before it has
  brought anything, and the next learner's store has the version that is asked for.

Knows nothing of nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from torch import Tensor

from rhymeflow.core.types import Version
from rhymeflow.utils import objects, progress
from rhymeflow.utils.objects import Reference
from rhymeflow.weights.base import Pulled, StoreLost, TensorChunk, Update, VersionUnavailable
from rhymeflow.weights.changes import Changes, Finder, Found, pack, shares
from rhymeflow.weights.handle import ObjectWeightHandle
from rhymeflow.weights.manifest import Manifest, TensorSpec, require_names, require_spec
from rhymeflow.weights.proof import bytes_of, combine, digest, require_equal

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


class Difference(NamedTuple):
    """What changed since the publication before."""

    base: Pulled
    num_bytes: int
    reference: Reference


class Publication(NamedTuple):
    """What can be had of one version."""

    made: Pulled
    digests: list[int]
    parts: tuple[Part, ...] | None
    """None: the whole version is not kept any more."""
    difference: Difference | None


Catalogue = tuple[Publication, ...]
"""In the order in which they were published."""


class ObjectWeightStore:
    """The learner's side: a `base.WeightStore`.

    `keep`: how many differences to keep; 0: none is made.
    """

    def __init__(self, manifest: Manifest, *, keep: int) -> None:
        self._objects, self._manifest, self._keep = objects.here(), manifest, keep
        self._catalogue: Catalogue = ()  # replaced, never changed: it is read by another thread
        self._finder = Finder(manifest) if keep else None
        self._metrics: dict[str, float] = {}
        self._objects.offer(QUESTION, lambda: self._catalogue)

    @property
    def handle(self) -> ObjectWeightHandle:
        """How readers find it."""
        return ObjectWeightHandle(self._objects.name, self._manifest)

    @property
    def metrics(self) -> Mapping[str, float]:
        """How much changed, where differences are kept; see `base.WeightStore`."""
        return self._metrics

    def publish(self, version: Version, tensors: Mapping[str, Tensor]) -> int:
        """Let `version` be pulled; see `base.WeightStore`.

        Raises:
            ManifestMismatch: they are not the manifest's tensors.
        """
        require_names(self._manifest, tensors)
        previous = self._previous()
        writer = _Writer(self._objects, self._manifest)
        digests: list[int] = []
        found: list[Found] = []
        for spec in self._manifest:
            tensor = tensors[spec.name]  # once: it may be gathered from many ranks for this
            require_spec(spec, tensor)
            source = bytes_of(tensor)
            digests.append(digest(source))
            if previous is not None and self._finder is not None:
                found.append(self._finder.find(source, previous.bytes_of(spec)))
            writer.put(spec, source)
            progress.advance()
        made = Pulled(version, combine(self._manifest, digests))
        difference = None if previous is None else self._difference(previous, made, digests, found)
        self._enter(Publication(made, digests, writer.end(), difference))
        return made.checksum

    def close(self) -> None:
        """Let go of the buffers; readers keep what they have."""
        self._catalogue = ()

    def _previous(self) -> _Whole | None:
        """The publication before, to compare with; it is on this node."""
        if not self._catalogue or self._finder is None:
            return None
        last = self._catalogue[-1]
        assert last.parts is not None
        return _Whole(last, self._objects.get([part.reference for part in last.parts]))

    def _difference(
        self, previous: _Whole, made: Pulled, digests: Sequence[int], found: Sequence[Found]
    ) -> Difference:
        base = previous.publication.made
        size, parts = pack(base, made, digests, found)
        self._metrics = shares(self._manifest, found, size)
        return Difference(base, size, self._objects.put(np.concatenate(parts)))

    def _enter(self, new: Publication) -> None:
        """Add to the catalogue, and let go of what is too old."""
        published = (*self._catalogue, new)[-max(self._keep, WHOLE_VERSIONS) :]
        with_differences = len(published) - self._keep
        with_parts = len(published) - WHOLE_VERSIONS
        self._catalogue = tuple(
            each._replace(
                parts=each.parts if number >= with_parts else None,
                difference=each.difference if number >= with_differences else None,
            )
            for number, each in enumerate(published)
        )


class ObjectWeightReader:
    """One puller's side: a `base.WeightReader`."""

    def __init__(self, handle: ObjectWeightHandle) -> None:
        """Does not ask for anything yet."""
        self._objects, self._handle = objects.here(), handle
        self._executor = ThreadPoolExecutor(1, "weights")
        self._fetching: tuple[Pulled | None, Version | None, Future[_Fetched]] | None = None
        self._pulling: Publication | None = None

    @property
    def handle(self) -> ObjectWeightHandle:
        """How another process opens its own."""
        return self._handle

    @property
    def manifest(self) -> Manifest:
        """The tensors there are."""
        return self._handle.manifest

    @property
    def version(self) -> Version | None:
        """The version a pull would bring now; None before the first is published."""
        catalogue = self._ask()
        return catalogue[-1].made.version if catalogue else None

    def prepare(self, have: Pulled | None, want: Version) -> bool:
        """Fetch to this node what will be needed, in the background; see `base.WeightReader`."""
        if self._fetching is None or self._fetching[:2] != (have, want):
            self._fetching = have, want, self._executor.submit(self._fetch, have, want)
        fetch = self._fetching[2]
        if fetch.done() and isinstance(fetch.exception(), StoreLost):
            self._fetching = None
            fetch.result()  # raises it
        return fetch.done()

    def changes(self, have: Pulled, want: Version | None) -> Update | None:
        """The listed changes since `have`, and tensors that changed too much whole."""
        try:
            fetched = self._fetched(have, want)
        except VersionUnavailable:
            return None  # `pull` says so
        if fetched.steps is None:
            self._fetching = have, want, _done(fetched)  # for `pull`
            return None
        self._pulling = fetched.whole.publication
        whole = set().union(*(step.whole for step in fetched.steps))
        listed = (
            {name: each for name, each in step.listed.items() if name not in whole}
            for step in fetched.steps
        )
        return Update(tuple(listed), self._chunks(fetched.whole, whole))

    def pull(self, have: Version | None, want: Version | None) -> Iterator[TensorChunk]:
        """Every tensor whole; see `base.WeightReader`."""
        if self._fetching is not None and self._fetching[1] == want:
            fetched = self._fetched(self._fetching[0], want)
        else:
            fetched = self._fetch(None, want)
        if fetched.steps is not None:  # only what changed was prepared, and it did not do
            fetched = self._fetch(None, want)
        self._pulling = fetched.whole.publication
        yield from self._chunks(fetched.whole, {spec.name for spec in self.manifest})

    def prove(self, digests: Mapping[str, int]) -> Pulled:
        """Compare with what the learner published; see `base.WeightReader`."""
        assert self._pulling is not None, "nothing was pulled"
        publication, self._pulling = self._pulling, None
        require_equal(self.manifest, publication.made, publication.digests, digests)
        return publication.made

    def _chunks(self, whole: _Whole, names: set[str]) -> Iterator[TensorChunk]:
        for spec in self.manifest:
            if spec.name in names:
                yield TensorChunk(spec.name, 0, whole.bytes_of(spec))

    def _fetched(self, have: Pulled | None, want: Version | None) -> _Fetched:
        """What was prepared for this, or is fetched now."""
        fetching, self._fetching = self._fetching, None
        if fetching is not None and fetching[:2] == (have, want):
            return fetching[2].result()
        return self._fetch(have, want)

    def _fetch(self, have: Pulled | None, want: Version | None) -> _Fetched:
        """The changes since `have` and the tensors that they leave out, or all of the weights."""
        catalogue = self._ask()
        target = next(
            (n for n in reversed(range(len(catalogue))) if catalogue[n].made.version == want),
            None if want is not None or not catalogue else len(catalogue) - 1,
        )
        if target is None:
            held = [each.made.version for each in catalogue if each.parts is not None]
            raise VersionUnavailable(f"the learner does not hold version {want}; it holds {held}")
        publication = catalogue[target]
        chain = None if have is None else _chain(self.manifest, catalogue[: target + 1], have)
        with lost_with(self._handle.owner):
            if chain is not None:
                buffers = self._objects.get([each.reference for each in chain])
                steps = [Changes(self.manifest, buffer.copy()) for buffer in buffers]
                whole = set().union(*(step.whole for step in steps))
                if publication.parts is not None or not whole:
                    for step in steps:
                        step.listed  # noqa: B018 - is made now, not while the puller waits for it
                    return _Fetched(self._get(publication, whole), steps)
            if publication.parts is None:
                raise VersionUnavailable(f"the learner does not keep version {want} whole")
            return _Fetched(self._get(publication, None), None)

    def _get(self, publication: Publication, names: set[str] | None) -> _Whole:
        """The parts that have the tensors of these names; None: all."""
        needed = [
            part
            for part in publication.parts or ()
            if names is None
            or any(s.name in names and part.start <= s.offset < part.end for s in self.manifest)
        ]
        buffers = self._objects.get([part.reference for part in needed])
        return _Whole(publication._replace(parts=tuple(needed)), buffers)

    def _ask(self) -> Catalogue:
        with lost_with(self._handle.owner):
            found: Catalogue = self._objects.ask(self._handle.owner, QUESTION)
        return found


class _Writer:
    """Puts tensors in the manifest's order, some in each part."""

    def __init__(self, store: objects.Objects, manifest: Manifest) -> None:
        self._store, self._parts = store, list[Part]()
        self._ranges = _ranges(manifest)
        largest = max((end - start for start, end in self._ranges), default=0)
        self._buffer = np.zeros(largest, np.uint8)

    def put(self, spec: TensorSpec, source: np.ndarray) -> None:
        if not spec.num_bytes:
            return
        start, end = self._ranges[len(self._parts)]
        if spec.offset >= end:
            self._flush()
            start, end = self._ranges[len(self._parts)]
        at = spec.offset - start
        self._buffer[at : at + spec.num_bytes] = source

    def end(self) -> tuple[Part, ...]:
        if self._ranges:
            self._flush()
        return tuple(self._parts)

    def _flush(self) -> None:
        start, end = self._ranges[len(self._parts)]
        self._parts.append(Part(start, end, self._store.put(self._buffer[: end - start])))


class _Whole(NamedTuple):
    """Parts of a publication that are on this node, with their bytes."""

    publication: Publication
    buffers: list[np.ndarray]

    def bytes_of(self, spec: TensorSpec) -> np.ndarray:
        """The tensor's bytes, in place."""
        if not spec.num_bytes:
            return np.empty(0, np.uint8)
        for part, buffer in zip(self.publication.parts or (), self.buffers, strict=True):
            if part.start <= spec.offset and spec.offset + spec.num_bytes <= part.end:
                at = spec.offset - part.start
                return buffer[at : at + spec.num_bytes]
        raise LookupError(f"{spec.name} was not fetched")


class _Fetched(NamedTuple):
    """What a pull takes; on this node."""

    whole: _Whole
    steps: list[Changes] | None
    """None: the whole version is there."""


def _chain(manifest: Manifest, catalogue: Catalogue, have: Pulled) -> list[Difference] | None:
    """What leads from `have` to the last publication; None if it is not there, or is too much."""
    steps: list[Difference] = []
    left = sum(spec.num_bytes for spec in manifest)
    for publication in reversed(catalogue):
        if publication.made == have:
            return steps[::-1]
        step = publication.difference
        if step is None or (left := left - step.num_bytes) < 0:
            return None
        steps.append(step)
        if step.base == have:
            return steps[::-1]
    return None


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


def _done(fetched: _Fetched) -> Future[_Fetched]:
    future: Future[_Fetched] = Future()
    future.set_result(fetched)
    return future


@contextmanager
def lost_with(owner: str) -> Iterator[None]:
    """Raise `StoreLost` where the block finds that the learner is gone."""
    try:
        yield
    except objects.OwnerLost as error:
        raise StoreLost(f"{owner}, which published the weights, is gone: {error}") from None


__all__ = ["ObjectWeightReader", "ObjectWeightStore"]
