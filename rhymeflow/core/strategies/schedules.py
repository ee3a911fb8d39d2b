"""Schedules: the rules by name, and the five bundles of them.

A bundle fixes when groups are admitted, where trajectories go, when an instance pulls, what becomes
of what runs there, and what moves. How stale anything may become is not its business: that is the
protocol's, whatever the rules are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rhymeflow.core.plan import Admission, OnPull
from rhymeflow.core.strategies.hurrying import gating, nobody
from rhymeflow.core.strategies.migration import lasting, none, rebalance
from rhymeflow.core.strategies.placing import laid_out, outliers
from rhymeflow.core.strategies.routing import fewest_requests, waterfall
from rhymeflow.core.strategies.sync import consolidated, drained, greedy, status
from rhymeflow.core.strategies.view import Hurrying, Migrating, Routing, Sync

ROUTING: Mapping[str, Routing] = {
    "fewest_requests": fewest_requests,
    "waterfall": waterfall,
    "laid_out": laid_out,
}
SYNC: Mapping[str, Sync] = {
    "drained": drained,
    "greedy": greedy,
    "status": status,
    "consolidated": consolidated,
}
MIGRATION: Mapping[str, Migrating] = {
    "none": none,
    "rebalance": rebalance,
    "outliers": outliers,
    "lasting": lasting,
}

HURRYING: Mapping[str, Hurrying] = {"nobody": nobody, "gating": gating}


class Bundle(NamedTuple):
    """The rules of a schedule."""

    admission: Admission
    routing: Routing
    sync: Sync
    on_pull: OnPull
    migration: Migrating
    pace: float | None
    """Batches' worth of groups produced at a time; None: as many as the bound allows."""
    hurrying: Hurrying = nobody
    lays_out: bool = False
    """Whether steps are laid out over the instances."""
    throughput_ratio: float = 5.0
    """An instance gives work away to one that has this many times less of it."""


SCHEDULES: Mapping[str, Bundle] = {
    "synchronous": Bundle("lockstep", fewest_requests, drained, "drain", none, None),
    "one_step": Bundle("lockstep", fewest_requests, drained, "drain", none, None),
    "bounded": Bundle("protocol", fewest_requests, drained, "drain", none, None),
    "partial": Bundle("protocol", fewest_requests, greedy, "keep", none, None),
    "staleflow": Bundle("protocol", waterfall, greedy, "spread", rebalance, 1.0),
    "histopipe": Bundle("protocol", laid_out, drained, "keep", outliers, None, lays_out=True),
    "rhymeflow": Bundle(
        "protocol", waterfall, consolidated, "spread", lasting, 1.5, gating, throughput_ratio=3.0
    ),
}
"""`synchronous` and `one_step` differ in their bound, 0 and 1: with it the protocol has entries for
one batch at a time, or for the next one too."""
