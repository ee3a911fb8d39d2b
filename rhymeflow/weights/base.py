"""The seam between the learner's weights and the instances that pull them, each at its own time.

    store.publish(version, tensors)                    in the learner
    reader = handle.open()                             in the process that holds the tensors
    pulled = Installation(into).pull(reader, version)  `weights/install.py`

A pull neither waits for a publication nor holds one up, and a puller that dies in the middle blocks
no other process. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import numpy as np

from rhymeflow.core.types import Version
from rhymeflow.utils import progress
from rhymeflow.weights.changes import Changes, Listed, whole_in
from rhymeflow.weights.manifest import Manifest, TensorSpec, require_spec
from rhymeflow.weights.proof import Pulled, bytes_of, require_equal

if TYPE_CHECKING:
    from torch import Tensor


class VersionUnavailable(LookupError):  # noqa: N818 - it is what happened
    """The version asked for cannot be had (not yet, or no longer)."""


class Overtaken(RuntimeError):  # noqa: N818 - it is what happened
    """What was being pulled was written over meanwhile: pull again."""


class StoreLost(RuntimeError):  # noqa: N818 - it is what happened
    """Whoever published is gone, and the weights with it; nothing was brought.

    The next learner will publish them again, in a store of its own.
    """


class TensorBytes(NamedTuple):
    """All bytes of one tensor, [n] uint8; valid until the next tensor is taken."""

    name: str
    data: np.ndarray


class Update(NamedTuple):
    """What turns weights that a puller has into those of another version."""

    steps: tuple[Mapping[str, Listed], ...]
    """To be put in one after the other, each by name of tensor."""
    whole: Iterator[TensorBytes]
    """Whole tensors to be copied; they are in none of the steps."""


class WeightStore(Protocol):
    """The learner's side."""

    @property
    def handle(self) -> WeightHandle:
        """How readers find it."""

    def publish(self, version: Version, tensors: Mapping[str, Tensor]) -> int:
        """Let `version` be pulled; return the checksum that proves it.

        The tensors are those of the manifest, on any device; they must not change until this
        returns.

        Raises:
            ManifestMismatch: they are not the manifest's tensors.
        """

    @property
    def metrics(self) -> Mapping[str, float]:
        """Of the last publication, by their names in `metrics.jsonl`."""

    def close(self) -> None:
        """Give back what it keeps; readers keep what they have."""


class SharedMemoryWeightHandle(msgspec.Struct, frozen=True, tag="shared_memory"):
    """Reaches the weights from any process of the machine that holds the memory of this name."""

    name: str
    manifest: Manifest
    has_changes: bool = False
    """What changed from version to version is there too."""

    def open(self) -> WeightReader:
        """Open it in this process, which is the one that holds the tensors.

        Raises:
            FileNotFoundError: the process that created the memory is gone.
        """
        from rhymeflow.weights.shared_memory import SharedMemoryWeightReader

        return SharedMemoryWeightReader(self)


class ObjectWeightHandle(msgspec.Struct, frozen=True, tag="objects"):
    """The same from any process of the cluster of which `owner` is one."""

    owner: str
    manifest: Manifest

    def open(self) -> WeightReader:
        """Be able to ask the owner; does not look whether it is there."""
        from rhymeflow.weights.objects import ObjectWeightReader

        return ObjectWeightReader(self)


WeightHandle = SharedMemoryWeightHandle | ObjectWeightHandle
"""Where the weights are: what messages carry."""


class Fetched(NamedTuple):
    """What a pull takes of a publication."""

    made: Pulled
    """What it makes, if it is proved."""
    digests: Callable[[], Sequence[int]]
    """Of each tensor that was published. Raises `Overtaken` if other bytes may have been read."""
    bytes_of: Callable[[TensorSpec], np.ndarray]
    steps: Sequence[Changes] | None
    """What leads here from the weights that the puller has; None: it is not known."""


class WeightReader:
    """One puller's side.

    A pull is proved afterwards, by digests of what the puller then computes with and not of what
    was sent (law 5). Between the two the puller may do as it likes with a tensor: copy it in place,
    or hand it to an engine that repacks weights. `changes` is the shorter way for a puller whose
    weights were proved; its digests need not be taken anew, for a change's share in them is known.
    All raise `StoreLost` where what they need cannot be fetched any more.
    """

    def __init__(self, handle: WeightHandle) -> None:
        self.handle, self.manifest = handle, handle.manifest
        self._executor = ThreadPoolExecutor(1, "weights")
        self._fetching: tuple[Pulled | None, Version | None, Future[Fetched]] | None = None
        self._pulling: Fetched | None = None

    @property
    def version(self) -> Version | None:
        """The version a pull would bring now; None before the first is published."""
        raise NotImplementedError

    def _fetch(self, have: Pulled | None, want: Version | None) -> Fetched:
        """What a pull of `want` (None: the newest) takes, by changes since `have` if that does."""
        raise NotImplementedError

    def prepare(self, have: Pulled | None, want: Version) -> bool:
        """Begin to fetch, in the background, what `changes` will need; whether that is here.

        To be asked again until it is. Nothing depends on it but how long `changes` takes, or, for
        None, `pull`.
        """
        if self._fetching is None or self._fetching[:2] != (have, want):
            self._fetching = have, want, self._executor.submit(self._fetch, have, want)
        fetch = self._fetching[2]
        if fetch.done() and isinstance(fetch.exception(), StoreLost):
            self._fetching = None
            fetch.result()  # raises it
        return fetch.done()

    def changes(self, have: Pulled, want: Version | None) -> Update | None:
        """What turns `have` into the weights of `want` (None: the newest).

        None if it is not known, or takes longer than `pull`. To be proved as a pull is.
        """
        fetching, self._fetching = self._fetching, None
        if fetching is None or fetching[:2] != (have, want):
            fetching = have, want, Future()
            try:
                fetching[2].set_result(self._fetch(have, want))
            except VersionUnavailable:
                return None  # `pull` says so
        elif isinstance(fetching[2].exception(), VersionUnavailable):
            return None
        fetched = fetching[2].result()
        if fetched.steps is None:
            self._fetching = fetching  # for `pull`
            return None
        self._pulling, whole = fetched, whole_in(fetched.steps)
        listed = (
            {name: each for name, each in step.listed.items() if name not in whole}
            for step in fetched.steps
        )
        return Update(tuple(listed), self._tensors(fetched, whole))

    def pull(self, want: Version | None) -> Iterator[TensorBytes]:
        """Every tensor of `want` (None: the newest), whole.

        Raises:
            VersionUnavailable: `want` is not there, or nothing is.
        """
        fetching, self._fetching = self._fetching, None
        is_prepared = fetching is not None and fetching[1] == want
        fetched = fetching[2].result() if fetching and is_prepared else self._fetch(None, want)
        if fetched.steps is not None:  # only what changed was prepared, and it did not do
            fetched = self._fetch(None, want)
        self._pulling = fetched
        yield from self._tensors(fetched, {spec.name for spec in self.manifest})

    def prove(self, digests: Mapping[str, int]) -> Pulled:
        """The last pull as it ended, given the digest of each tensor that the puller now has.

        Raises:
            Overtaken: what was pulled is no whole version; pull again.
            ChecksumMismatch: what arrived is not what was published.
        """
        assert self._pulling is not None, "nothing was pulled"
        pulling, self._pulling = self._pulling, None
        require_equal(self.manifest, pulling.made, pulling.digests(), digests)
        return pulling.made

    def _tensors(self, fetched: Fetched, names: set[str]) -> Iterator[TensorBytes]:
        for spec in self.manifest:
            if spec.name in names:
                yield TensorBytes(spec.name, fetched.bytes_of(spec))


def given(
    manifest: Manifest, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[TensorSpec, np.ndarray]]:
    """The bytes of each tensor of the manifest, in its order.

    Each is looked up once, so a mapping may make them (gather them from ranks) one after the other.
    """
    for spec in manifest:
        tensor = tensors[spec.name]
        require_spec(spec, tensor)
        yield spec, bytes_of(tensor)
        progress.advance()
