"""Section `simulation`: the cluster and the workload of `rhymeflow simulate`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rhymeflow.config.section import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section


class WorkloadConfig(Section):
    """Lengths of the responses of a simulated run. `--workload RUN_DIR` takes them from a run.

    Lengths are lognormal, cut off at `rollout.max_completion_length`. Each prompt has its own mean,
    so that its earlier responses predict the lengths of later ones."""

    mean_length: PositiveFloat | None = None
    """Mean length of a response in tokens, after the cut-off; `None`: a quarter of
    `rollout.max_completion_length`."""
    sigma: PositiveFloat = 0.8
    """Standard deviation of the logarithm of the length."""
    prompt_tokens: Positive = 128
    """Length of each prompt in tokens."""
    num_prompts: Positive = 10_000
    """Number of prompts in an epoch."""
    prompt_variance_share: Annotated[float, Field(ge=0, le=1)] = 0.65
    """Share of the variance of lengths that the prompt explains (RhymeRL's authors: 0.65)."""
    epoch_correlation: Annotated[float, Field(ge=0, le=1)] = 0.98
    """Correlation of a prompt's mean between one epoch and the next; below 1 it drifts."""
    mean_turns: Annotated[float, Field(ge=1, le=10_000)] = 1.0
    """Mean number of the policy's turns in a response, which divide its length among them. The
    number is geometric, at most eight times the mean. 1: no environment."""
    observation_tokens: NonNegative = 64
    """Length in tokens of an observation, the environment's answer between two turns."""
    environment_seconds: NonNegativeFloat = 0.5
    """Mean time in seconds until the environment answers; lognormal."""


class FaultsConfig(Section):
    """Failures in a simulated run, and how long recovery takes. By default nothing fails.

    Failures are independent of one another and of age. When a device fails, its instance or the
    learner is lost, and with `colocated` all instances and the learner. Checkpoints follow
    `run.save_seconds` and `run.save_steps`. The default times are assumptions, not measurements."""

    device_mtbf_hours: PositiveFloat | None = None
    """Mean hours between two failures of a device (MTBF); `None`: none fails. With n devices some
    device fails n times as often. Llama 3's authors report 419 unexpected interruptions in 54 days
    on 16,384 devices: 50,700 hours."""
    controller_mtbf_hours: PositiveFloat | None = None
    """Mean hours between two failures of the controller's machine. Such a failure ends every
    process of the run, which is then resumed. `None`: it does not fail."""
    instance_seconds: NonNegativeFloat = 120.0
    """Seconds until a new instance has loaded, from when the loss is noticed: ten seconds after the
    failure. It then takes over the responses by recomputing their stored tokens."""
    learner_seconds: NonNegativeFloat = 180.0
    """Seconds from noticing the loss until a new learner has loaded a checkpoint, or the controller
    has resumed. Retraining the batches since the checkpoint takes extra time."""
    checkpoint_copy_seconds: NonNegativeFloat = 1.0
    """Seconds for which a checkpoint stops the learner."""
    checkpoint_write_seconds: NonNegativeFloat = 60.0
    """Seconds after that until the checkpoint can be loaded."""


class SimulationConfig(Section):
    """The cluster that `rhymeflow simulate` simulates: `rollout.num_instances` instances and a
    learner of `learner.num_ranks` devices."""

    profile: str | None = None
    """Profile with the speed of the cluster, by name or file; `None`: that of
    `schedule.cost_model`, so that routing knows the true costs. If neither is given, the one that
    Rhymeflow has for the same model and GPUs."""
    colocated: bool = False
    """Whether the same devices generate and train in turn. Requires a staleness bound of 0: with
    any other, rollout and training overlap."""
    workload: WorkloadConfig = WorkloadConfig()
    faults: FaultsConfig = FaultsConfig()
    skip_steps: NonNegative = 1
    """Number of first steps that throughput and idle shares leave out."""
    acceptance: Annotated[float, Field(ge=0, lt=1)] = 0.7
    """Probability that a drafted token is accepted if those before it were, in a response of mean
    length to a prompt that was answered in an earlier epoch; for others it is 0.3, as drafts come
    from the same group. Longer responses accept less (docs/simulator.md). With `--workload RUN_DIR`
    each response has its own. RhymeRL's authors report 65% to 79% of drafted tokens. Drafts follow
    `drafting.window` (`off`: none, else as many as pay) and `drafting.max_draft`."""
    tick_seconds: PositiveFloat = 0.01
    """Least time in seconds between two plans of the coordinator, which plans only after events."""
    snapshot_seconds: PositiveFloat = 0.25
    """Seconds between two reports of a busy instance, besides those after commands."""
    message_seconds: NonNegativeFloat = 0.001
    """Time in seconds of a message between the coordinator and an instance or the learner."""
    reward_seconds: NonNegativeFloat = 0.01
    """Time in seconds of computing a reward; any number are computed at once."""
