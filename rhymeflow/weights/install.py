"""Pulling weights into tensors, in place and proved.

Holds true: what is proved is what stands in the tensors after the copy. After an error they hold
anything. Knows nothing of where the weights come from.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rhymeflow.core.types import Version
from rhymeflow.weights.base import Overtaken, Pulled, TensorChunk, VersionUnavailable, WeightReader
from rhymeflow.weights.manifest import TensorSpec, require
from rhymeflow.weights.proof import bytes_of, digest

_MAX_OVERTAKEN = 1000
"""A reader is overtaken once per two publications; more often means that they never pause."""


def install(
    reader: WeightReader,
    into: Mapping[str, Tensor],
    want: Version | None = None,
    *,
    have: Version | None = None,
) -> Pulled:
    """Bring `want`, or the newest weights for None, into these tensors, which hold `have`.

    Raises:
        ManifestMismatch: they are not the manifest's tensors.
        VersionUnavailable: nothing is published, or not `want`.
        ChecksumMismatch: what arrived is not what was published.
    """
    require(reader.manifest, into)
    specs = {spec.name: spec for spec in reader.manifest}
    for _ in range(_MAX_OVERTAKEN):
        digests: dict[str, int] = {}
        for chunk in reader.pull(have, want):
            target = into[chunk.name]
            _copy(chunk, specs[chunk.name], target)
            if len(chunk.data) == specs[chunk.name].num_bytes:
                digests[chunk.name] = digest(bytes_of(target))  # while it is in the caches
            else:
                digests.pop(chunk.name, None)
        for name in specs.keys() - digests.keys():
            digests[name] = digest(bytes_of(into[name]))
        try:
            return reader.prove(digests)
        except Overtaken:
            have = None
    raise RuntimeError(f"overtaken by publications {_MAX_OVERTAKEN} times during one pull")


def install_at_least(
    reader: WeightReader, into: Mapping[str, Tensor], want: Version, *, have: Version | None = None
) -> Pulled:
    """Bring `want` or, if it is there no longer, the newest weights; see `install`."""
    try:
        return install(reader, into, want, have=have)
    except VersionUnavailable:
        pulled = install(reader, into)
        assert pulled.version > want, "a version is published before it is pulled"
        return pulled


def _copy(chunk: TensorChunk, spec: TensorSpec, target: Tensor) -> None:
    end = chunk.offset + len(chunk.data)
    if target.device.type == "cpu" and target.is_contiguous():
        np.copyto(bytes_of(target)[chunk.offset : end], chunk.data)
    elif len(chunk.data) == spec.num_bytes:
        if spec.num_bytes:
            staged = torch.from_numpy(chunk.data.copy()).view(target.dtype).reshape(spec.shape)
            target.detach().copy_(staged)
    else:
        staged = bytes_of(target).copy()
        staged[chunk.offset : end] = chunk.data
        target.detach().copy_(torch.from_numpy(staged).view(target.dtype).reshape(spec.shape))
