"""What a simulated cluster is made of, and what an instance of it has done. Plain records."""

from __future__ import annotations

from dataclasses import dataclass

from rhymeflow.core.cost import CostModel
from rhymeflow.sim.drafts import Drafts


@dataclass(frozen=True, slots=True)
class Hardware:
    """What all instances of a cluster have in common."""

    cost: CostModel
    capacity: int
    """Trajectories that run at a time."""
    kv_capacity: int
    """Tokens in the cache."""
    watermark: int
    """Tokens of the cache that an admission leaves free."""
    max_prefill_tokens: int
    """Tokens that one iteration prefills."""
    max_length: int
    """A response of this length ends for reason `length`, a shorter one for `stop`."""
    keep_cache: bool
    drafts: Drafts | None = None
    """Chooses drafts; None: there are none."""


@dataclass(slots=True)
class Tally:
    """What an instance did, in seconds and counts."""

    decode: float = 0.0
    prefill: float = 0.0
    """Seconds of iterations that took something in."""
    prefilled: float = 0.0
    """Seconds by which these were longer for it."""
    pull: float = 0.0
    pulls: int = 0
    preemptions: int = 0
    interrupts: int = 0
    """Responses that were stopped to be continued, here or elsewhere, or to be concluded."""
    lost: int = 0
    """Tokens that were not stored when it died."""
    tokens_generated: float = 0
    """With drafts, of responses that are still decoded a fraction is counted."""
    prompt_tokens: int = 0
    """Tokens prefilled for responses that had not begun."""
    recomputed: int = 0
    """Tokens prefilled for responses that had."""
    turns: int = 0
    """Iterations of each trajectory that decoded in them, summed; like what follows 0 without
    drafts."""
    drafted: int = 0
    """Tokens."""
    accepted: float = 0
    """Those of them that were."""

    @property
    def busy(self) -> float:
        """Seconds in which it did anything."""
        return self.decode + self.prefill + self.pull
