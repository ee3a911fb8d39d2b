"""vLLM's weights as they are before its layers pack them, kept so that changes can be put in.

What a packer made of a weight cannot be changed in place. So where a weight store knows what
changed from version to version, each layer's weight is kept as the packer was given it; changes are
put in there, and the layers of which something changed are packed again. What is not packed is
changed where it stands.

Holds true: see `weights/install.py`; a layer that is not named as changed was given, bit for bit,
what is kept of it. Takes the memory of the packed weights once more. Imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from rhymeflow.core.types import Version
from rhymeflow.engine.vllm.places import Place, Target, shape_of
from rhymeflow.weights.base import Pulled, WeightReader
from rhymeflow.weights.install import Installation
from rhymeflow.weights.manifest import Manifest


class Unpacked:
    """What layers are packed from, and which of them have something older."""

    def __init__(self, places: Mapping[str, Place], manifest: Manifest) -> None:
        """They hold anything until the first pull."""
        self.buffers: dict[str, Tensor] = {}
        """By target, of those that are packed."""
        into = {}
        for spec in manifest:
            place = places[spec.name]
            target = place.target
            if not target.is_packed:
                whole = target.tensor().data
            elif (whole := self.buffers.get(target.name)) is None:
                whole = torch.empty(shape_of(target, places), dtype=getattr(torch, spec.dtype))
                self.buffers[target.name] = whole
            into[spec.name] = whole[place.destination]
        self._places = places
        self._installation = Installation(into)
        self._taken: dict[str, int] = {}
        """Digests of what layers were given."""

    def pull(self, reader: WeightReader, want: Version | None) -> Pulled:
        """Bring `want`, newer ones if those are gone, or the newest for None; proved.

        Raises what `Installation.pull` does.
        """
        if want is None:
            return self._installation.pull(reader)
        return self._installation.pull_at_least(reader, want)

    def take_changed(self) -> list[Target]:
        """Targets that differ from what they were when this was called last."""
        digests = self._installation.digests
        changed = [name for name, found in digests.items() if self._taken.get(name) != found]
        self._taken = dict(digests)
        targets = (self._places[name].target for name in changed)
        return list({target.name: target for target in targets}.values())


def can_be_kept(places: Iterable[Place], manifest: Manifest) -> bool:
    """Whether this process has the weights whole, and in the dtype that they are published in.

    Of a part of a tensor its digest cannot be followed.
    """
    dtypes = {spec.name: getattr(torch, spec.dtype) for spec in manifest}
    found = [place.target for place in places]
    return not any(target.is_split for target in found) and all(
        target.tensor().dtype == dtypes[name] for target in found for name in target.parts
    )


__all__ = ["Unpacked", "can_be_kept"]
