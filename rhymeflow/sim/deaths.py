"""Carries out failures on a simulated cluster: who dies, what is lost, and when it is back.

Holds true: what was published stays published; a response is lost back to what was stored of it,
and no further; who is struck again while it restarts begins to restart anew. Draws nothing by
chance (`faults.py` does).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING

from rhymeflow.core.events import InstanceLeft, LearnerReady, TrajectoryInterrupted
from rhymeflow.errors import UserError
from rhymeflow.sim.faults import Failure, Recovery, Victim

if TYPE_CHECKING:
    from rhymeflow.sim.cluster import Cluster

_HOPELESS = 10_000
"""Failures without a step between them, after which the run is given up."""


class Deaths:
    """The failures of a run.

    Args:
        cluster: that they happen to.
        recovery: how what dies comes back; None: there are no failures.
        failures: in order; they may be without end.
    """

    def __init__(
        self, cluster: Cluster, recovery: Recovery | None, failures: Iterable[Failure]
    ) -> None:
        self.counts: Counter[str] = Counter()
        """Until now, of an `instance`, the `learner`, `devices`, the `controller`."""
        self.silent_until = 0.0
        """The controller is away so long: it hears nothing and commands nothing."""
        self._cluster, self._recovery, self._failures = cluster, recovery, iter(failures)
        self._restored_at = inf
        self._steps = self._since_step = 0

    def expect(self) -> None:
        """The next failure will happen."""
        failure = next(self._failures, None)
        if failure is not None:
            self._cluster.at(failure.at, self._fail, failure.victim)

    def _fail(self, victim: Victim) -> None:
        recovery = self._recovery
        assert recovery is not None
        self._check_hope()
        self.counts["instance" if isinstance(victim, int) else victim] += 1
        if victim == "controller":
            self.silent_until = self._cluster.now + recovery.detection + recovery.learner
        if isinstance(victim, int):
            self._lose_instance(victim, recovery)
        else:
            self._lose_learner(recovery)
        if victim in ("devices", "controller"):
            for place in range(self._cluster.num_instances):
                self._lose_instance(place, recovery)
        self.expect()

    def _check_hope(self) -> None:
        steps = len(self._cluster.steps)
        self._since_step = self._since_step + 1 if steps == self._steps else 1
        self._steps = steps
        if self._since_step > _HOPELESS:
            raise UserError(
                f"simulation.faults: step {steps + 1} is never done: {_HOPELESS:,} failures came "
                "before it"
            )

    def _lose_instance(self, place: int, recovery: Recovery) -> None:
        cluster = self._cluster
        lost = cluster.instances.lose(place, cluster.now, recovery.store)
        if lost is not None:
            name, responses = lost
            stored = [TrajectoryInterrupted(r.id, name, 0, r.stored) for r in responses]
            noticed = recovery.detection + cluster.latencies.message_seconds
            cluster.report([*stored, InstanceLeft(name, "failure")], noticed)
        up = max(cluster.now + recovery.detection + recovery.instance, self.silent_until)
        cluster.at(up, cluster.join, (place, cluster.instances.losses(place)))

    def _lose_learner(self, recovery: Recovery) -> None:
        cluster = self._cluster
        cluster.learner.die(cluster.now)
        loaded = max(cluster.now + recovery.detection + recovery.learner, self.silent_until)
        self._restored_at = loaded + cluster.learner.retrain()
        cluster.at(self._restored_at, self._restore, cluster.now)

    def _restore(self, died: float) -> None:
        cluster = self._cluster
        if self._restored_at != cluster.now:
            return  # it died again meanwhile
        self._restored_at = inf
        cluster.learner.restored(died, cluster.now)
        cluster.report([LearnerReady(cluster.published)])
        for place in cluster.instances.waiting():
            cluster.join((place, cluster.instances.losses(place)))
        cluster.expect_version()
