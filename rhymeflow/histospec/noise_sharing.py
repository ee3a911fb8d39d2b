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


def epoch_of_noise(config: Config, epoch: int, member: int) -> int:
    """The epoch that keys the noise of a group's `member`, requested in `epoch`: 0 for so many of
    the first as rhyme (`rollout.rhyming_noise`); groups of a suite keep theirs."""
    if epoch == EVALUATION_EPOCH:
        return epoch
    num_members = config.rollout.num_generations + config.schedule.extra_generations
    return 0 if member < round(config.rollout.rhyming_noise * num_members) else epoch
