"""Section `simulation`: the cluster and the workload of `rhymeflow simulate`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rhymeflow.config.section import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section


class WorkloadConfig(Section):
    """How long the responses of a simulated run are. `--workload RUN_DIR` takes them from a run.

    Lengths are lognormal, cut off at `rollout.max_completion_length`; each prompt has its own
    level, so that what it did before says something about what it will do.
    """

    mean_length: PositiveFloat | None = None
    """Mean tokens of a response, after the cut-off; `None`: a quarter of
    `rollout.max_completion_length`."""
    sigma: PositiveFloat = 0.8
    """Standard deviation of the logarithm."""
    prompt_tokens: Positive = 128
    """Tokens of each prompt."""
    num_prompts: Positive = 10_000
    """Prompts of an epoch."""
    prompt_variance_share: Annotated[float, Field(ge=0, le=1)] = 0.65
    """Share of the variance of lengths that the prompt explains within an epoch. 0.65 is what
    RhymeRL's authors report."""
    epoch_correlation: Annotated[float, Field(ge=0, le=1)] = 0.98
    """Correlation of a prompt's level between one epoch and the next; below 1 it drifts."""
    mean_turns: Annotated[float, Field(ge=1, le=10_000)] = 1.0
    """Turns of the policy in a response, geometrically distributed, at most eight times as many;
    they share its length. 1: there is no environment."""
    observation_tokens: NonNegative = 64
    """Tokens that the environment answers between two turns."""
    environment_seconds: NonNegativeFloat = 0.5
    """Mean seconds that an answer takes; lognormal."""


class FaultsConfig(Section):
    """What dies in a simulated run, and how long it is away. By default nothing does.

    Failures are independent of one another and of age. A device's takes the instance with it that
    it is part of, or the learner; with `colocated` all of both. Checkpoints are written as
    `run.save_seconds` and `run.save_steps` say. What the times are by default is assumed.
    """

    device_mtbf_hours: PositiveFloat | None = None
    """Mean hours between two failures of a device (MTBF); `None`: none fails. A group of n devices
    fails n times as often. Llama 3's authors report 419 unexpected interruptions in 54 days on
    16,384 devices: 50,700 hours."""
    controller_mtbf_hours: PositiveFloat | None = None
    """The same of the controller's machine, whose failure ends all processes of the run, which is
    then resumed; `None`: it does not fail."""
    instance_seconds: NonNegativeFloat = 120.0
    """From when a death is noticed, ten seconds later, until another instance has loaded, and
    joins. It takes over the responses of the lost one by recomputing what was stored of them."""
    learner_seconds: NonNegativeFloat = 180.0
    """From then until another learner has loaded a checkpoint, or the controller is where it was.
    Training the batches since the checkpoint once more comes on top."""


class SimulationConfig(Section):
    """The cluster that `rhymeflow simulate` runs a configuration on, in virtual time:
    `rollout.num_instances` instances and a learner of `learner.num_ranks` devices."""

    profile: str | None = None
    """How fast the cluster is: a profile's name or file; `None`: that of `schedule.cost_model`,
    so that routing weighs with the truth. Where neither is given, a shipped one of the same model
    and GPUs."""
    colocated: bool = False
    """The devices of the instances generate, then all of them train, in turn. Only where the
    schedule's bound is 0: else the two would go on at the same time on the same devices."""
    workload: WorkloadConfig = WorkloadConfig()
    faults: FaultsConfig = FaultsConfig()
    skip_steps: NonNegative = 1
    """Steps at the beginning that throughput and idle shares leave out."""
    acceptance: Annotated[float, Field(ge=0, lt=1)] = 0.7
    """Probability that a drafted token is accepted, given that those before it were, for a prompt
    that was answered in an earlier epoch; 0.3 for others, whose drafts come from siblings only.
    RhymeRL's authors report 65% to 79% of drafted tokens. Drafts follow `drafting.window` (`off`:
    none, else as many as pay) and `drafting.max_draft`."""
    tick_seconds: PositiveFloat = 0.01
    """The coordinator plans at most this often, and only when something has happened."""
    snapshot_seconds: PositiveFloat = 0.25
    """How often a busy instance says how it is, besides after commands."""
    message_seconds: NonNegativeFloat = 0.001
    """From the coordinator to an instance or the learner, and back."""
    reward_seconds: NonNegativeFloat = 0.01
    """For the reward of a response; any number are computed at a time."""
