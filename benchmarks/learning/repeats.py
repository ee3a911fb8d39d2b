"""What the responses of a run have in common from one epoch to the next.

A response is compared with that of the same prompt and member an epoch before. Both are read from
their beginning: up to their first difference they saw the same text, so each token there is one
more case of two policies, and the same or another noise, choosing alike; what comes after a
difference has another context and counts only in `equal`. Knows nothing of rewards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


class Response(NamedTuple):
    """One response that was trained on."""

    row: int
    """Which prompt."""
    epoch: int
    member: int
    tokens: Tokens
    reward: float


@dataclass(frozen=True, slots=True)
class Common:
    """Sums over pairs of responses."""

    pairs: int = 0
    identical: int = 0
    """Pairs without a difference."""
    tokens: int = 0
    """Positions: of each pair the longer response's."""
    prefix: int = 0
    """Positions before the first difference."""
    equal: int = 0
    """Positions with the same token, before and after."""

    def __add__(self, other: Common) -> Common:
        return Common(
            self.pairs + other.pairs,
            self.identical + other.identical,
            self.tokens + other.tokens,
            self.prefix + other.prefix,
            self.equal + other.equal,
        )

    def shares(self) -> dict[str, float]:
        """`identical` of pairs, `prefix` and `equal` of positions, and `agreement`.

        `agreement`: how often a token is that of the epoch before if all before it are, the rate
        that (1 - TV) / (1 + TV) bounds from below where noise rhymes.
        """
        differing = self.pairs - self.identical
        return {
            "identical": self.identical / self.pairs,
            "prefix": self.prefix / self.tokens,
            "equal": self.equal / self.tokens,
            "agreement": self.prefix / (self.prefix + differing),
        }


def common(earlier: Tokens, later: Tokens) -> Common:
    """Compare two responses, of at least one token each."""
    shorter, longer = sorted((len(earlier), len(later)))
    same = earlier[:shorter] == later[:shorter]
    prefix = shorter if same.all() else int(np.argmin(same))
    return Common(1, int(prefix == longer), longer, prefix, int(same.sum()))


def by_epoch(responses: Iterable[Response], members: range) -> dict[int, Common]:
    """For each epoch but the first: its responses of these members against those an epoch before.

    Pairs of which one is missing (a run ends inside an epoch) are left out.
    """
    chosen = {(r.row, r.member, r.epoch): r.tokens for r in responses if r.member in members}
    found: dict[int, Common] = {}
    for (row, member, epoch), tokens in sorted(chosen.items(), key=lambda item: item[0]):
        earlier = chosen.get((row, member, epoch - 1))
        if earlier is not None:
            found[epoch] = found.get(epoch, Common()) + common(earlier, tokens)
    return dict(sorted(found.items()))


def distinct(responses: Sequence[Response]) -> float:
    """Of all responses the share that is different texts, equal ones to two prompts counted twice.

    1: no prompt was ever answered twice with the same words.
    """
    return len({(r.row, r.tokens.tobytes()) for r in responses}) / len(responses)


def halves(responses: Iterable[Response], num_members: int) -> dict[int, float]:
    """By epoch: mean reward of the first half of the members less that of the others.

    Both answer the same prompts under the same weights: what is not chance is the noise's doing.
    """
    sums: dict[int, list[list[float]]] = {}
    for response in responses:
        first, second = sums.setdefault(response.epoch, [[], []])
        (first if response.member < num_members // 2 else second).append(response.reward)
    return {
        epoch: float(np.mean(first) - np.mean(second))
        for epoch, (first, second) in sorted(sums.items())
    }
