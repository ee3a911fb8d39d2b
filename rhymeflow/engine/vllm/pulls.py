"""Pulling weights into all of vLLM's workers, whether one is this process or each is another.

Holds true: after `pull` returned, all workers hold the same version; if it raised `StoreLost`, none
has anything of another than it had. Knows nothing of how a worker puts weights into its part of the
model.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from rhymeflow.core.types import Version
from rhymeflow.engine.vllm.llm import Llm
from rhymeflow.utils import objects
from rhymeflow.weights.base import Pulled, StoreLost, WeightReader

COMPARED_PULLS = 3
"""So many pulls, the one at the start included, are followed by a comparison with fresh layers."""

LOST_SECONDS = 0.1
"""Between attempts to bring to all workers what some of them have, while the learner is gone."""


class Pulls:
    """The pulls of one engine."""

    def __init__(self, llm: Llm, *, is_here: bool) -> None:
        """`is_here`: the only worker is in this process; else each opens a reader of its own."""
        self._llm, self._is_here, self._num_pulls = llm, is_here, 0
        if not is_here and objects.are_shared():
            llm.call("rhymeflow_join", objects.here().join)

    def prepare(self, weights: WeightReader, have: Pulled, want: Version) -> bool:
        """Fetch in the background what `pull` will need; whether it is here.

        Raises:
            StoreLost: it cannot be fetched any more.
        """
        if self._is_here:
            return weights.prepare(have, want)
        found = self._llm.call("rhymeflow_prepare", weights.handle, want)
        for error in _losses(found):
            raise error
        return all(found)

    def pull(self, weights: WeightReader, want: Version | None) -> Pulled:
        """Bring `want`, newer ones if those are gone, or the newest for None.

        Raises:
            StoreLost: it cannot be fetched any more.
        """
        self._num_pulls += 1
        compare = self._num_pulls <= COMPARED_PULLS
        source = weights if self._is_here else weights.handle
        while True:
            pulled = self._llm.call("rhymeflow_install", source, want, compare)
            lost = list(_losses(pulled))
            if len(lost) == len(pulled):
                raise lost[0]
            if lost:  # what some have, all must get
                time.sleep(LOST_SECONDS)
                continue
            if all(each == pulled[0] for each in pulled):
                return Pulled(*pulled[0])
            want = max(each.version for each in pulled)


def _losses(found: Iterable[object]) -> Iterable[StoreLost]:
    return (each for each in found if isinstance(each, StoreLost))


__all__ = ["Pulls"]
