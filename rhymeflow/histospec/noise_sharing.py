"""Which epoch's noise a response is sampled with.

With Gumbel-max sampling by counter, two policies that differ little choose the same token from the
same noise with probability at least (1 - TV) / (1 + TV), where TV is the total variation between
their distributions there (Daliri, Musco and Suresh, arXiv 2408.07978). So a response with the noise
of the last epoch repeats most of what it said there, and drafts from it are accepted.
"""

from __future__ import annotations

from rhymeflow.config import Config

EVALUATION_EPOCH = 2**31 - 1
"""Groups of a suite are requested in an epoch that training never reaches. It keys their noise: the
same in every evaluation, so that an answer is drafted by what it was before."""


def noise_epoch(epoch: int, member: int, *, num_members: int, share: float) -> int:
    """The epoch that keys the noise: 0 for the first `share` of a group's members; groups
    of a suite keep theirs."""
    if epoch == EVALUATION_EPOCH:
        return epoch
    return 0 if member < round(share * num_members) else epoch


def epoch_of_noise(config: Config, epoch: int, member: int) -> int:
    """The same by the rules of a run: of a group's `member`, requested in `epoch`."""
    rollout = config.rollout
    return noise_epoch(
        epoch,
        member,
        num_members=rollout.num_generations + config.schedule.extra_generations,
        share=rollout.rhyming_noise,
    )
