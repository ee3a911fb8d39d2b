"""What the coordinator needs of a configuration: the run's size (`Plan`) and rules (`Schedule`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from rhymeflow.core.strategies.base import Layout, Migrating, Routing, Settings, Sync
from rhymeflow.core.types import EvaluationId, SuiteName, Version

Admission = Literal["lockstep", "protocol"]
"""When a new group may start, on top of what the staleness protocol demands. `lockstep`: batch by
batch, when all of the one before is complete. `protocol`: whenever the protocol has an entry."""

BatchOrder = Literal["requested", "finished"]
"""Which groups make up the next batch: those that were admitted first, or that finish first."""

OnPull = Literal["drain", "keep", "reroute"]
"""What becomes of trajectories on an instance that pulls. `drain`: there are none, since one that
lags gets nothing new. `keep`: they continue there under the new weights. `reroute`: they are
interrupted first, and routed again."""


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
    layout: Callable[[], Layout]  # called once by a coordinator; routing and migration read it
    is_replayed: bool = False
    """Whether the rules repeat the decisions of a log; a tick then pulls exactly what they say."""


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
    """By suite: evaluate every so many versions; 0: only the first and last, which always are."""
    extra_groups: int  # entries of a buffer beyond `groups_per_batch`; surplus is aborted
    extra_generations: int  # trajectories of a group beyond `num_generations`; surplus is aborted
    filter_zero_variance: bool  # drop groups whose rewards are all equal: no advantage, no gradient
    max_filtered: int  # most groups filtered between two versions; later ones are kept
    on_stuck: Literal["wait", "retry", "truncate"]
    """What to do with the last `stuck_threshold` groups that an idle learner waits for."""
    stuck_threshold: int
    max_retries: int
    """Times that the prompt of a stuck group is retried; then the learner waits."""

    def evaluates(self, suite: SuiteName, version: Version) -> bool:
        """Whether `version` is to be evaluated on a suite."""
        if suite not in self.eval_steps:
            return False
        every = self.eval_steps[suite]
        return version in (0, self.num_batches) or (every > 0 and version % every == 0)

    def evaluations(self, versions: Iterable[Version]) -> set[EvaluationId]:
        """The evaluations of these versions."""
        return {
            EvaluationId(version, suite)
            for version in versions
            for suite in self.eval_steps
            if self.evaluates(suite, version)
        }
