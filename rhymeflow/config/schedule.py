"""Section `schedule`: when work is admitted, where it goes and when weights are pulled."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rhymeflow.config.section import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section
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
    routing_gain: NonNegativeFloat = 0.0
    """StaleFlow's mu: an instance is taken if it gains at least this share of what an empty one
    would. Its authors take 0.2 to 0.3, which leaves caches half empty for fresher versions; in our
    measurements 0 trains more (docs/lab-log.md)."""
    kv_headroom: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of an instance's KV cache that `waterfall` leaves free, so that what runs can grow."""
    max_waiting: NonNegative = 3
    """With more than this many waiting on an instance, they are sent back to be routed anew."""
    throughput_ratio: Annotated[float, Field(gt=1)] | None = None
    """An instance gives work away to one that has this many times less of it. `None` as the
    schedule has it: 3 for `rhymeflow`, 5 (StaleFlow's) for the others."""
    max_slowdown: Annotated[float, Field(gt=1)] | None = None
    """Sync rule `gather_stragglers`: how many times slower than alone a response may be decoded
    among those that the last instances of an old version take over. `None`: 1 + (bound + 1) / 8."""
    alternate_order: bool = True
    """`histopipe`: a step's layout runs against the one before it, and an instance begins the next
    step while others are at this one. `False`: every step waits for the one before."""
    balance_instances: bool = True
    """`histopipe`: long responses get more instances, by search over completion times. `False`:
    every instance gets as many prompts."""
    outlier_ratio: Annotated[float, Field(gt=1)] = 1.5
    """`histopipe`: a response among the last of its instance is moved elsewhere, or put off to the
    next step, when it has this many times the tokens that its prompt's history predicted."""
    extra_groups: NonNegative = 0
    """Groups generated for each batch beyond `groups_per_batch`; the slowest are aborted."""
    extra_generations: NonNegative = 0
    """Trajectories generated for each group beyond `num_generations`; the slowest are aborted."""
    filter_zero_variance: bool = False
    """Train on no group whose rewards do not differ, but on another prompt (DAPO's dynamic
    sampling)."""
    max_filtered_batches: Positive = 4
    """How many batches' worth of groups may be filtered between two steps; then they pass."""
    on_stuck: Literal["wait", "retry", "truncate"] = "wait"
    """What is done when an idle learner waits for the last `stuck_threshold` groups of a batch:
    `retry` aborts them and requests their prompts again, `truncate` finishes them early and
    trains on what there is."""
    stuck_threshold: Positive = 1
    """Groups that may be missing for a batch to count as stuck."""
    max_retries: NonNegative = 2
    """Times a prompt is retried because of `on_stuck`; then it is waited for."""

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
