"""What may be changed when a run is resumed, and why the rest may not.

Holds true: what is changed has no part in what is in flight or was promised about it; everything
else is refused with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping

from rhymeflow.config import Config
from rhymeflow.config.load import dump_config, parse_config
from rhymeflow.core.types import Version
from rhymeflow.errors import UserError

_STORED = "responses that are stored or in flight were made under it"
FIXED: Mapping[str, str] = {
    "model": "the checkpoints and the policy in flight are of this model",
    "data": "groups name its rows, and their order goes on where it stopped",
    "schedule": "what is in flight was admitted and routed under it",
    "run.seed": "the order of the data and the noise of sampling follow from it",
    "run.output_dir": "it is where the run is",
    "learner.groups_per_batch": "batches in flight have this size",
    "learner.beta": "the reference policy is made when a run begins",
    "rollout.num_generations": "groups in flight have this size",
    "rollout.max_completion_length": _STORED,
    "rollout.temperature": _STORED,
    "rollout.top_p": _STORED,
    "rollout.top_k": _STORED,
    "rollout.rhyming_noise": _STORED,
    "simulation": "nothing is simulated",
}
"""Sections and fields, with the reason why they stay."""


def changed(config: Config, overrides: Mapping[str, str], published: Version) -> Config:
    """The configuration of the next attempt at a run that reached version `published`.

    Raises:
        UserError: a field is not there, has no such value, or stays what it is.
    """
    after = parse_config(dump_config(config), overrides, where="the run's configuration")
    for name in overrides:
        section = name.partition(".")[0]
        reason = FIXED.get(name, FIXED.get(section))
        if reason is not None and _value(config, name) != _value(after, name):
            raise UserError(f"--{name}: cannot be changed when a run is resumed: {reason}")
    if after.learner.max_steps < published:
        raise UserError(
            f"--learner.max_steps: the run has reached step {published} and cannot end at "
            f"{after.learner.max_steps}"
        )
    return after


def _value(config: Config, name: str) -> object:
    found: object = config
    for part in name.split("."):
        found = getattr(found, part)
    return found
