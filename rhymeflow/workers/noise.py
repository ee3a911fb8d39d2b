"""Which noise a response is sampled with, by the rules of its run.

Holds true: the instance that samples and the history that drafts are aligned by say the same.
"""

from __future__ import annotations

from rhymeflow.config import Config
from rhymeflow.histospec.noise_sharing import noise_epoch


def epoch_of_noise(config: Config, epoch: int, member: int) -> int:
    """The epoch that keys the noise of a group's `member`, requested in `epoch`."""
    rollout = config.rollout
    return noise_epoch(
        epoch,
        member,
        num_members=rollout.num_generations + config.schedule.extra_generations,
        share=rollout.rhyming_noise,
    )
