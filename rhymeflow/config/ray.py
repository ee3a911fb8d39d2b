"""Section `ray`: the Ray cluster that a run's workers are actors of."""

from __future__ import annotations

from rhymeflow.config.section import NonNegativeFloat, Section


class RayConfig(Section):
    """With `runtime: ray`: the cluster that workers run on (docs/ray.md)."""

    address: str | None = None
    """The cluster: `auto` for the one that this machine is part of, or HOST:PORT; `None` starts one
    of this machine alone, which ends with the run."""
    wait_seconds: NonNegativeFloat = 300.0
    """How long a worker may wait for room on the cluster, such as for a node that an autoscaler
    starts, and for its process; then it counts as lost."""
