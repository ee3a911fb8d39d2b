"""Section `schedule`: when prompts are admitted, where they go and when weights are pulled."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from rhymeflow.config.section import NonNegative, PositiveFloat, Section
from rhymeflow.utils.bounds import FIXED_BOUNDS, bound_of


class ScheduleConfig(Section):
    """When prompts are admitted, where they go and when weights are pulled.

    `name` selects a set of rules; `routing`, `sync`, `migration` and `on_pull` replace one of them.
    The first three take a name or your function, `path/to/file.py:function` or dotted."""

    by_name = "name"

    name: Literal[
        "synchronous", "one_step", "bounded", "partial", "staleflow", "histopipe", "rhymeflow"
    ] = "rhymeflow"
    """How rollout and training overlap. `synchronous`: they take turns. `one_step`: one batch is
    generated while the previous one is trained on. `bounded`: as many groups are in flight as the
    bound allows, and an instance pulls when its responses have finished. `partial`: responses
    continue across versions; an instance pulls whenever it lags. `staleflow`: as `partial`, with
    one batch's worth of groups in flight, routing by marginal throughput, and migration of
    responses between instances. `histopipe`: prompts are ranked by the lengths of their earlier
    responses and distributed over the instances step by step, long beside short. `rhymeflow`: as
    `staleflow`, but responses of an old version are gathered on few instances, and those that are
    about to end are not moved."""
    max_staleness: NonNegative | None = None
    """The staleness bound: how many versions old a trajectory may be when it is trained on. `None`:
    0 for `synchronous`, 1 for the others."""
    routing: str | None = None
    """How instances are chosen: `fewest_requests`, `waterfall`, `planned`; `None`: by `name`."""
    sync: str | None = None
    """When an instance pulls: `when_idle`, `greedy`, `when_version_unusable` or
    `gather_stragglers`; `None`: by `name`."""
    migration: str | None = None
    """Which running responses change instances: `none`, `rebalance`, `skip_nearly_done` or
    `migrate_outliers`; `None`: by `name`."""
    on_pull: Literal["drain", "keep", "reroute"] | None = None
    """Running responses of an instance that pulls: `drain` lets them finish first, `keep` continues
    them there, `reroute` routes them anew; `None`: by `name`."""
    batch_order: Literal["requested", "finished"] | None = None
    """Which groups make up the next batch. `requested`: those that were admitted first, so that the
    order of finishing does not matter. `finished`: those that finish first, which are shorter than
    the rest; the learner waits less for long responses. `None`: `requested` for `rhymeflow`,
    `finished` for the others."""
    accumulate_early: bool | None = None
    """Whether the learner computes the gradient of each group as soon as it is complete, during the
    rollout of the rest of its batch. The gradient is the same up to the order of its sum. Each
    optimizer step must be a whole batch (`learner.num_iterations` and `num_minibatches` 1), and
    nothing may be compared across groups (no `learner.scale_rewards: batch` or `tokens`,
    `advantage: gae`, `kl_in: reward`, `multi_objective_aggregation: normalize_then_sum`,
    `normalize_importance_weights` or `top_entropy_quantile`). `None`: yes for `rhymeflow` where
    possible, no for the others."""
    max_inflight_batches: PositiveFloat | None = None
    """Most groups in flight at a time, counted in batches. With fewer, those that the learner waits
    for finish sooner; with more, the instances are better filled. `None`: as many as the bound
    allows."""
    cost_model: str = "demo-cpu"
    """Cost model of routing: a profile's name, or a file that `rhymeflow calibrate` wrote."""
    extra_groups: NonNegative = 0
    """Groups generated for each batch beyond `groups_per_batch`; the slowest are aborted."""
    extra_generations: NonNegative = 0
    """Trajectories generated for each group beyond `num_generations`; the slowest are aborted."""
    filter_zero_variance: bool = False
    """Replace a group whose rewards are all equal by another prompt (DAPO's dynamic sampling);
    after four batches' worth of such groups between two steps, further ones are trained on."""
    on_stuck: Literal["wait", "retry", "truncate"] = "wait"
    """What happens when an idle learner waits for the last group of a batch. `retry`: it is
    aborted, and its prompt is requested again, at most twice. `truncate`: its responses end now and
    are trained on."""

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
