"""Section `schedule`: when work is admitted, where it goes and when weights are pulled."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from rhymeflow.config.section import NonNegative, PositiveFloat, Section
from rhymeflow.utils.bounds import FIXED_BOUNDS, bound_of


class ScheduleConfig(Section):
    """When work is admitted, where it goes and when weights are pulled.

    `name` is a bundle of such rules; `routing`, `sync`, `migration` and `on_pull` replace one of
    them. Each takes a name or a function of your own, `path/to/file.py:function` or dotted.
    """

    by_name = "name"

    name: Literal[
        "synchronous", "one_step", "bounded", "partial", "staleflow", "histopipe", "rhymeflow"
    ] = "rhymeflow"
    """`synchronous`: rollout and training take turns. `one_step`: the next batch is generated while
    one is trained on, batch by batch. `bounded`: no batches; as many groups are in flight as the
    bound allows, and an instance pulls when it has finished what it runs. `partial`: responses go
    on across versions; an instance pulls whenever it lags. `staleflow`: responses also move between
    instances; routing by marginal throughput, migration, one batch's worth of groups at a time.
    `histopipe`: prompts are ranked by the lengths of their earlier responses and laid out over the
    instances step by step, long beside short. `rhymeflow`: as `staleflow`, but what is left of an
    old version is gathered on few instances, and what is about to end is not moved."""
    max_staleness: NonNegative | None = None
    """The bound: how many versions old a trajectory may be when trained on. `None`: 0 for
    `synchronous`, 1 for the others."""
    routing: str | None = None
    """`fewest_requests`, `waterfall` or `planned`; `None` as the schedule has it."""
    sync: str | None = None
    """When an instance pulls: `when_idle`, `greedy`, `when_version_unusable` or
    `gather_stragglers`; `None` as the schedule has it."""
    migration: str | None = None
    """`none`, `rebalance`, `skip_nearly_done` or `migrate_outliers`; `None` as the schedule has
    it."""
    on_pull: Literal["drain", "keep", "reroute"] | None = None
    """What becomes of what runs on an instance that pulls: `drain` lets it finish first, `keep`
    goes on with it there, `reroute` routes it anew; `None` as the schedule has it."""
    batch_order: Literal["requested", "finished"] | None = None
    """Which groups make up the next batch. `requested`: those that were admitted first, so that
    batches are the same whatever finishes first. `finished`: those that finish first, which are
    shorter than the rest; the learner waits less for long responses. `None` as the schedule has it:
    `requested` for `rhymeflow`, `finished` for the others."""
    accumulate_early: bool | None = None
    """Whether the learner computes the gradient of a batch's groups as they are complete, and not
    when all are. The gradient is the same up to the order of its sum, and with any bound, 0 too,
    training goes on beside the rollout of its own batch. Each optimizer step must be a whole batch
    (`learner.num_iterations` and `num_minibatches` 1), and no reward be compared across its groups
    (no `learner.scale_rewards: batch`, no `multi_objective_aggregation: normalize_then_sum`).
    `None`: where that is so, as the schedule has it: `rhymeflow` does, the others do not."""
    max_inflight_batches: PositiveFloat | None = None
    """Batches' worth of groups in flight at a time: fewer leave the machine to the groups that the
    learner waits for, more fill it better. `None` as the schedule has it: 1 for `staleflow`, 1.5
    for `rhymeflow`, as many as the bound allows for the others."""
    cost_model: str = "demo-cpu"
    """What routing weighs with: a profile's name, or a file that `rhymeflow calibrate` wrote."""
    extra_groups: NonNegative = 0
    """Groups generated for each batch beyond `groups_per_batch`; the slowest are aborted."""
    extra_generations: NonNegative = 0
    """Trajectories generated for each group beyond `num_generations`; the slowest are aborted."""
    filter_zero_variance: bool = False
    """Train on no group whose rewards do not differ, but on another prompt (DAPO's dynamic
    sampling). Of four batches' worth of groups between two steps; then they pass."""
    on_stuck: Literal["wait", "retry", "truncate"] = "wait"
    """What is done when an idle learner waits for the last group of a batch: `retry` aborts it and
    requests its prompt again, twice at most; `truncate` finishes it early and trains on what there
    is."""

    @property
    def bound(self) -> int:
        """The staleness bound."""
        return bound_of(self.name, self.max_staleness)

    @model_validator(mode="after")
    def _bound_fits(self) -> ScheduleConfig:
        fixed = FIXED_BOUNDS.get(self.name)
        if fixed is not None and self.bound != fixed:
            raise ValueError(
                f"max_staleness = {self.max_staleness} does not fit the schedule "
                f"`{self.name}`, whose bound is {fixed}"
            )
        return self
