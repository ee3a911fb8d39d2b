"""The coordinator's part of a configuration: the run's size (`Plan`) and rules (`Schedule`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from rhymeflow.core.strategies.base import Layout, Migrating, Routing, Settings, Sync
from rhymeflow.core.types import EvaluationId, SuiteName, Version

Admission = Literal["lockstep", "protocol"]
"""When a new group may start, if the staleness protocol allows it. `lockstep`: when the batch
before its own is complete. `protocol`: at any time."""

BatchOrder = Literal["requested", "finished"]
"""Which groups make up the next batch: those admitted first, or those that finish first."""

OnPull = Literal["drain", "keep", "reroute"]
"""What happens to trajectories on an instance that pulls. `drain`: it pulls once it has none, and
an instance that lags gets no new ones. `keep`: they continue there under the new weights.
`reroute`: they are interrupted first, and routed again."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The rules of a run."""

    admission: Admission
    routing: Routing
    sync: Sync
    on_pull: OnPull
    migration: Migrating
    max_inflight_groups: int
    settings: Settings
    layout: Callable[[], Layout]  # called once; routing and migration read the result
    is_replayed: bool = False
    """Whether the rules repeat the decisions of a log; each tick then pulls exactly as they say."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of the run, and the parameters of the staleness protocol."""

    num_batches: int
    groups_per_batch: int
    num_generations: int
    max_length: int  # most tokens of a response
    max_staleness: int
    batch_order: BatchOrder
    accumulate_early: bool  # begin a batch's gradient with the groups that are complete
    eval_steps: Mapping[SuiteName, int]
    """Versions between evaluations, by suite. First and last are always evaluated; 0: only they."""
    extra_groups: int  # entries of a buffer beyond `groups_per_batch`; surplus is aborted
    extra_generations: int  # members of a group beyond `num_generations`; surplus is aborted
    filter_zero_variance: bool  # drop groups whose rewards are all equal: no advantage, no gradient
    max_filtered: int  # most groups filtered between two versions; later ones are kept
    on_stuck: Literal["wait", "retry", "truncate"]
    """What to do with at most `stuck_threshold` groups that an idle learner waits for."""
    stuck_threshold: int
    max_retries: int  # most retries of the prompt of a stuck group; then the learner waits

    def evaluates(self, suite: SuiteName, version: Version) -> bool:
        """Whether `version` is to be evaluated on `suite`."""
        if suite not in self.eval_steps:
            return False
        every = self.eval_steps[suite]
        return version in (0, self.num_batches) or (every > 0 and version % every == 0)

    def evaluations(self, versions: Collection[Version]) -> set[EvaluationId]:
        """Return the evaluations that are due for these versions."""
        last = self.num_batches
        return {
            EvaluationId(version, suite)
            for suite, every in self.eval_steps.items()
            for version in (*range(0, last + 1, every or max(last, 1)), last)
            if version in versions
        }
