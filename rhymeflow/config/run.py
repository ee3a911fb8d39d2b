"""Sections `run`, `cluster`, `ray` and `weights`: the run as a whole, and its machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rhymeflow.config.section import (
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    Temperature,
)

RUNS = Path("runs")
"""Parent of the run directory of a run without `output_dir`."""

_EARLY = 2 / 3  # share of `save_seconds` after which a version that is evaluated is saved


class RunConfig(Section):
    """The run as a whole."""

    seed: NonNegative = 0
    """Seed of data order, sampling noise and generators."""
    output_dir: Annotated[str, Field(min_length=1)] | None = None
    """The run directory; `None` makes `runs/NAME-DATE-TIME`."""
    eval_steps: NonNegative = 10
    """Versions between two evaluations on held-out prompts, besides those at the start and the end;
    0: only at the start and the end, or if it is set by `resume`, only at the end."""
    eval_temperature: Temperature = 0.0
    """Temperature of held-out evaluation; 0 is greedy."""
    save_seconds: NonNegativeFloat = 120.0
    """Longest training time in seconds between two checkpoints: a resumed run repeats no more than
    this. After two thirds of it, the next version that gets `best_metric` is saved, so that the
    best one is among the checkpoints. 0: no limit. The last version is always saved."""
    save_steps: NonNegative = 0
    """Most steps between two checkpoints; 0: no limit."""
    save_total_limit: NonNegative = 2
    """Newest checkpoints that are kept, besides the best one by `best_metric`; 0 keeps all."""
    checkpoint_dir: Annotated[str, Field(min_length=1)] | None = None
    """Directory or URL that fsspec knows (`s3://bucket/run/checkpoints`) for the checkpoints of
    this run alone. All nodes of the learner, and the controller's, must reach it; the rest of the
    run stays on the controller's disk. `None`: the run directory."""
    best_metric: str = "eval/reward"
    """Metric that is highest at the best checkpoint: `eval/reward`, the mean held-out reward, or
    `eval/NAME/avg@N`, `pass@K` or `maj@N` of a suite that the run evaluates
    (docs/evaluation.md)."""
    report_to: tuple[Literal["tensorboard", "wandb", "trackio", "swanlab", "mlflow"], ...] = (
        "tensorboard",
    )
    """Trackers that get the metrics, besides `metrics.jsonl`."""
    project: str | None = None
    """Project of the run in W&B, trackio and SwanLab, experiment in MLflow. `None`: `WANDB_PROJECT`
    (W&B's), or rhymeflow."""
    entity: str | None = None
    """Team or user that the run belongs to in W&B, workspace in SwanLab. `None`: `WANDB_ENTITY`, or
    the account's own."""
    run_group: str | None = None
    """Group of runs in W&B, trackio and SwanLab that this one is shown with. `None`:
    `WANDB_RUN_GROUP`, or none."""
    tags: tuple[str, ...] = ()
    """The run's tags in W&B and SwanLab. Empty: those of `WANDB_TAGS`, or none."""
    keep_tokens: NonNegative | None = None
    """Versions whose responses keep tokens, log-probabilities and text in `events.db`, counted from
    the newest; 0: only what resuming and drafting may still read. What belongs to older versions is
    deleted during the run, so that the size of `events.db` depends on the run's rate and not on its
    length. The number of tokens that each instance generated stays. `None`: all are kept."""
    backup: str | None = None
    """Directory or URL that fsspec knows (`s3://bucket/run`), to which the run is copied at each
    checkpoint, so that `rhymeflow resume URL` continues it if the machine is lost. Each run needs
    its own. Checkpoints in `checkpoint_dir` are not copied. `None`: no backup."""
    token_details: bool = False
    """Store for each token also whether it was drafted, the learner's log-probability when it was
    trained on, and whether it was clipped, capped or masked (docs/run-directory.md)."""
    profile_steps: tuple[Positive, ...] = ()
    """Steps, from 1, of which `profile/` in the run directory gets traces by torch's profiler: of
    each learner rank's micro-batches, optimizer steps and publication, and of up to 64 iterations
    of instance `rollout-0` under the version that the step starts from, or the next one that it
    pulls (docs/inspecting.md)."""
    worker_timeout: PositiveFloat = 300.0
    """Seconds without a message or without progress after which a worker counts as hung and is
    replaced. Each piece of its work must take less: a micro-batch on the slowest rank (the first
    with its compilation), an optimizer step, reading a batch, copying a checkpoint to main memory,
    an iteration of an engine, publishing or pulling a tensor. Calls of reward functions and
    environments have their own `timeout`. Work before the first piece (loading the model,
    compiling, vLLM's start) may take an hour."""
    instance_restarts: NonNegative = 3
    """How many rollout instances are replaced within an hour after they died or hung, while their
    responses continue elsewhere; one more stops the run. It is also how often in an hour the
    learner is restored from its checkpoint, and the reward worker and the history worker are
    started again, each counted by itself; without a history worker the run continues. An error
    (not a death) in any worker but the history worker stops the run at once."""

    @property
    def best_suite(self) -> str:
        """Name of the suite of `best_metric`."""
        suite = self.best_metric.removeprefix("eval/").rpartition("/")[0]
        return suite or "held_out"

    def saves(self, version: int, seconds: float, *, is_evaluated: bool, is_pending: bool) -> bool:
        """Whether a checkpoint of `version` is due after so many seconds of training since the last
        one; `is_evaluated`: it gets `best_metric`, `is_pending`: another is being written."""
        if self.save_steps and version % self.save_steps == 0:
            return True
        least = self.save_seconds * (_EARLY if is_evaluated else 1.0)
        return 0.0 < least <= seconds and not is_pending

    @model_validator(mode="after")
    def _checkpoints_replace_tokens(self) -> Self:
        if self.keep_tokens is not None and self.save_total_limit == 1:
            raise ValueError(
                "save_total_limit = 1 cannot be used with keep_tokens: after a loss of power the "
                "only checkpoint may be ahead of the log, and the tokens before it are deleted; "
                "use 2"
            )
        return self

    @model_validator(mode="after")
    def _trackers_have_these(self) -> Self:
        users = {
            "project": ("wandb", "trackio", "swanlab", "mlflow"),
            "entity": ("wandb", "swanlab"),
            "run_group": ("wandb", "trackio", "swanlab"),
            "tags": ("wandb", "swanlab"),
        }
        for name, trackers in users.items():
            if getattr(self, name) and not set(trackers).intersection(self.report_to):
                raise ValueError(
                    f"{name} has no effect: report_to does not name {' or '.join(trackers)}"
                )
        return self


class ClusterConfig(Section):
    """Identical machines that `--dry-run` plans a run for and `simulate` simulates, and that
    `rollout.num_instances` or `learner.num_ranks` follow from (docs/cluster.md).

    A run itself uses the machines that it finds."""

    nodes: Positive | None = None
    """Number of machines; `None`: this machine with its own GPUs and memory."""
    gpus_per_node: NonNegative = 8
    """GPUs of each machine."""
    gpu_memory_gb: PositiveFloat = 80.0
    """Memory of each GPU in GB."""
    memory_gb: PositiveFloat = 1000.0
    """Main memory of each machine in GB."""


class RayConfig(Section):
    """The Ray cluster that workers run on, with `runtime: ray` (docs/ray.md)."""

    address: str | None = None
    """Address of the cluster: HOST:PORT, or `auto` for the one that this machine is part of. `None`
    starts a cluster of this machine alone, which ends with the run."""
    wait_seconds: NonNegativeFloat = 300.0
    """Longest time in seconds that a worker waits for room on the cluster, such as for a node that
    an autoscaler starts, and for its process; then it counts as lost."""


class WeightsConfig(Section):
    """Transport of new weights from the learner to the instances."""

    transport: Literal["shared_memory", "delta"] = "shared_memory"
    """What an instance copies. `shared_memory`: all weights of a version. `delta`: only what
    changed since the version that it has, if that is little, so that it pauses for a shorter time;
    the weights are bit for bit the same. `delta` pays off in bfloat16 at small learning rates
    (docs/weights.md)."""
