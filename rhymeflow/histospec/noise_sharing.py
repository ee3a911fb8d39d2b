"""Chooses the epoch whose noise a response is sampled with.

With counter-based Gumbel-max sampling, two similar policies choose the same token from the same
noise with probability at least (1 - TV) / (1 + TV), where TV is the total variation distance of
their distributions (Daliri, Musco and Suresh, arXiv 2408.07978). So a response that shares its
noise with one of an earlier epoch repeats most of it, and drafts from that are accepted."""

from __future__ import annotations

from rhymeflow.config import Config

EVALUATION_EPOCH = 2**31 - 1
"""The epoch of evaluation groups, which training never reaches. It keys their noise: the same in
every evaluation, so that the last evaluation's response is a good draft."""


def epoch_of_noise(config: Config, epoch: int, member: int) -> int:
    """Return the epoch that keys the noise of a `member` of a group requested in `epoch`: 0 for the
    first `rollout.rhyming_noise` of the members, else `epoch`; evaluation groups keep theirs."""
    if epoch == EVALUATION_EPOCH:
        return epoch
    num_members = config.rollout.num_generations + config.schedule.extra_generations
    return 0 if member < round(config.rollout.rhyming_noise * num_members) else epoch
