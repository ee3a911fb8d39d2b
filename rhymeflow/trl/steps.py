"""TRL's batches and steps in ours: pure arithmetic, for a run of one process.

TRL generates for `steps_per_generation` micro-batches at a time and passes over them
`num_iterations` times, `gradient_accumulation_steps` of them to an optimizer step. Here a batch
makes a version: `num_minibatches` parts, passed over `num_iterations` times, with an optimizer step
for each. So an optimizer step has as many responses as in TRL, and a version as many steps.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from rhymeflow.errors import UserError


class Steps(NamedTuple):
    """What a version is made of."""

    groups_per_batch: int
    num_minibatches: int
    num_iterations: int
    generations: int = 1
    """Of TRL's generations, how many a batch has the responses of."""

    @property
    def per_version(self) -> int:
        """Optimizer steps, which TRL counts."""
        return self.num_minibatches * self.num_iterations

    def versions(self, optimizer_steps: float) -> int:
        """Versions of so many of TRL's steps; a version that is begun is made."""
        return max(1, math.ceil(optimizer_steps / self.per_version))


def steps_of(
    batch_size: int,
    accumulation: int,
    num_generations: int,
    per_generation: int,
    num_iterations: int = 1,
) -> Steps:
    """Bring TRL's five numbers to ours; `per_generation` is `steps_per_generation`.

    Raises:
        UserError: a step would end within a group or a generation batch.
    """
    generated = batch_size * per_generation
    if num_generations < 2 or generated % num_generations:  # set after TRL looked at it
        raise UserError(
            f"GRPOConfig: num_generations = {num_generations}, should be 2 at least, and divide "
            f"the {generated} responses that are generated at a time "
            f"(per_device_train_batch_size times {per_generation})"
        )
    if per_generation <= accumulation:  # one optimizer step takes all that was generated, or more
        if accumulation % per_generation or (per_generation < accumulation and num_iterations > 1):
            raise UserError(_uneven(per_generation, accumulation, num_iterations))
        groups = batch_size * accumulation // num_generations
        return Steps(groups, 1, num_iterations, accumulation // per_generation)
    if per_generation % accumulation:
        raise UserError(_uneven(per_generation, accumulation, num_iterations))
    if batch_size * accumulation % num_generations:
        raise UserError(
            f"GRPOConfig: an optimizer step has {batch_size * accumulation} responses, which are "
            f"no whole groups of num_generations = {num_generations}; raise "
            "gradient_accumulation_steps or lower steps_per_generation"
        )
    minibatches = per_generation // accumulation
    return Steps(generated // num_generations, minibatches, num_iterations)


def steps_per_epoch(steps: Steps, num_rows: int) -> int:
    """TRL's optimizer steps in an epoch: prompts that make no whole batch are left to the next.

    Raises:
        UserError: there are not enough rows for one batch.
    """
    generations = num_rows // (steps.groups_per_batch // steps.generations)
    batches = math.ceil(generations / steps.generations)
    if not batches:
        raise UserError(
            f"GRPOTrainer: train_dataset has {num_rows} rows, fewer than the "
            f"{steps.groups_per_batch // steps.generations} prompts that are generated for at a "
            "time (per_device_train_batch_size, gradient_accumulation_steps and "
            "steps_per_generation over num_generations)"
        )
    return batches * steps.per_version


def _uneven(per_generation: int, accumulation: int, num_iterations: int) -> str:
    return (
        f"GRPOConfig: with steps_per_generation = {per_generation}, gradient_accumulation_steps = "
        f"{accumulation} and num_iterations = {num_iterations} an optimizer step would take parts "
        "of several generations; let steps_per_generation be a multiple of "
        "gradient_accumulation_steps, or leave it out"
    )
