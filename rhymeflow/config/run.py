"""Section `run`: the run as a whole."""

from __future__ import annotations

from typing import Literal

from rhymeflow.config.section import NonNegative, NonNegativeFloat, PositiveFloat, Section


class RunConfig(Section):
    """The run as a whole."""

    seed: NonNegative = 0
    """Seeds data order, sampling noise and generators."""
    output_dir: str | None = None
    """The run directory; `None` makes `runs/NAME-DATE-TIME`."""
    eval_steps: NonNegative = 10
    """Evaluate on held-out prompts every so many versions, and at the start and the end; 0: only
    at the start and the end."""
    eval_temperature: NonNegativeFloat = 0.0
    """Temperature of held-out evaluation; 0 is greedy."""
    save_seconds: NonNegativeFloat = 120.0
    """Checkpoint when the steps since the last one took the learner so long: this much at most is
    trained again when a run is resumed. If evaluations come often, the next version that is
    evaluated is saved instead, so that the best by held-out reward is among the checkpoints. 0:
    never for this reason. There is one at the end in any case."""
    save_steps: NonNegative = 0
    """Checkpoint also every so many steps; 0: not."""
    save_total_limit: NonNegative = 2
    """The newest so many checkpoints stay, and the best by held-out reward; 0: all stay."""
    report_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ("tensorboard",)
    """Where metrics go besides `metrics.jsonl`."""
    token_details: bool = False
    """Store what else is known of each token: whether it was drafted, the learner's log-probability
    when it was trained on, and whether it was clipped, capped or masked (docs/run-directory.md)."""
    worker_timeout: PositiveFloat = 300.0
    """Seconds a worker may be silent before it counts as hung."""
    instance_restarts: NonNegative = 3
    """Rollout instances, in all, that may die or hang and are replaced, while their responses
    continue elsewhere; one more stops the run. The same number holds for the learner, which is
    restored as `rhymeflow resume` does, for the reward worker, and for the history worker, without
    which the run then goes on. An error in any of them but the history worker stops the run at
    once."""
