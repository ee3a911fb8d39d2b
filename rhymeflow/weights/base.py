"""The seam between the learner's weights and the instances that pull them, each at its own time.

    store.publish(version, tensors)                    in the learner
    reader = handle.open()                             in the process that holds the tensors
    pulled = install(reader, into, version)            `weights/install.py`

A pull brings chunks and is proved afterwards, by digests of what the puller then computes with and
not of what was sent (law 5). Between the two the puller may do as it likes with a chunk: copy it in
place, or hand it to an engine that repacks weights.

`changes` is the shorter way for a puller that has weights which were proved: the bits that differ
from those, if the store knows them. The proof is of the same digests, which then need not be taken
of whole tensors: a digest is a sum, and a change's share in it is known (`weights/proof.py`). What
this takes can be fetched by `prepare` while the puller still computes with what it has. A puller
that does without `changes` gets all there is by `pull`.

Holds true of every implementation: a pull neither waits for a publication nor holds one up; a
puller that dies in the middle blocks no other process. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from rhymeflow.core.types import Version
from rhymeflow.weights.manifest import Manifest

if TYPE_CHECKING:
    from torch import Tensor


class ChecksumMismatch(RuntimeError):  # noqa: N818 - it is what happened
    """The weights that arrived are not the weights that were published."""


class VersionUnavailable(LookupError):  # noqa: N818 - it is what happened
    """The version asked for cannot be had (not yet, or no longer)."""


class Overtaken(RuntimeError):  # noqa: N818 - it is what happened
    """What was being pulled was written over meanwhile: pull again."""


class StoreLost(RuntimeError):  # noqa: N818 - it is what happened
    """Whoever published is gone, and the weights with it; nothing was brought.

    The next learner will publish them again, in a store of its own.
    """


class Pulled(NamedTuple):
    """What a pull brought: proved weights of `version`."""

    version: Version
    checksum: int


class TensorChunk(NamedTuple):
    """Bytes of one tensor from byte `offset` on, [n] uint8; valid until the next chunk is taken."""

    name: str
    offset: int
    data: np.ndarray


class Listed(NamedTuple):
    """Changed 16-bit units of one tensor, in order, as `kernels.put_changes` takes them."""

    counts: np.ndarray
    """Of them, in each block of 65,536 units, [blocks] uint32."""
    places: np.ndarray
    """Of each, from the first unit of its block, [n] uint16."""
    values: np.ndarray
    """What each is now, [n] uint16."""


class Update(NamedTuple):
    """What turns weights that a puller has into those of another version."""

    steps: tuple[Mapping[str, Listed], ...]
    """To be put in one after the other, each by name of tensor."""
    whole: Iterator[TensorChunk]
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
        """

    @property
    def metrics(self) -> Mapping[str, float]:
        """Of the last publication, by their names in `metrics.jsonl`."""

    def close(self) -> None:
        """Give back what it keeps; readers keep what they have."""


class WeightHandle(Protocol):
    """Reaches the weights from another process; sent in messages."""

    @property
    def manifest(self) -> Manifest:
        """The tensors there are."""

    def open(self) -> WeightReader:
        """Open it in this process, which is the one that holds the tensors."""


class WeightReader(Protocol):
    """One puller's side."""

    @property
    def handle(self) -> WeightHandle:
        """How another process of the same engine opens its own."""

    @property
    def manifest(self) -> Manifest:
        """The tensors there are."""

    @property
    def version(self) -> Version | None:
        """The version a pull would bring now; None before the first is published."""

    def pull(self, have: Version | None, want: Version | None) -> Iterator[TensorChunk]:
        """What turns the weights of `have` (None: any) into those of `want` (None: the newest).

        Raises:
            VersionUnavailable: `want` is not there, or nothing is.
            StoreLost: before the first chunk.
        """

    def prepare(self, have: Pulled | None, want: Version) -> bool:
        """Begin to fetch, in the background, what `changes` will need; whether that is here.

        To be asked again until it is. Nothing depends on it but how long `changes` takes, or, for
        None, `pull`.

        Raises:
            StoreLost: it cannot be fetched any more.
        """

    def changes(self, have: Pulled, want: Version | None) -> Update | None:
        """What turns `have` into the weights of `want` (None: the newest).

        None if it is not known, or takes longer than `pull`. To be proved as a pull is.

        Raises:
            StoreLost: it cannot be fetched any more.
        """

    def prove(self, digests: Mapping[str, int]) -> Pulled:
        """The last pull as it ended, given the digest of each tensor that the puller now has.

        Raises:
            Overtaken: what was pulled is no whole version; pull again with `have=None`.
            ChecksumMismatch: what arrived is not what was published.
        """
