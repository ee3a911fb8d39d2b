"""Schedules: the rules by name, and the bundles of them; docs/schedules.md shows `SCHEDULES`.

The protocol bounds the staleness under any rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from rhymeflow.core.histopipe.pipeline import Pipeline
from rhymeflow.core.histopipe.strategies import migrate_outliers, planned
from rhymeflow.core.plan import Admission, BatchOrder, OnPull
from rhymeflow.core.strategies.base import Layout, Migrating, Routing, Sync
from rhymeflow.core.strategies.migration import none, rebalance, skip_nearly_done
from rhymeflow.core.strategies.routing import fewest_requests, waterfall
from rhymeflow.core.strategies.sync import (
    gather_stragglers,
    greedy,
    when_idle,
    when_version_unusable,
)

ROUTING: Mapping[str, Routing] = {
    rule.__name__: rule for rule in (fewest_requests, waterfall, planned)
}
SYNC: Mapping[str, Sync] = {
    rule.__name__: rule for rule in (when_idle, greedy, when_version_unusable, gather_stragglers)
}
MIGRATION: Mapping[str, Migrating] = {
    rule.__name__: rule for rule in (none, rebalance, skip_nearly_done, migrate_outliers)
}


class Bundle(NamedTuple):
    """The rules of a schedule."""

    admission: Admission
    routing: Routing
    sync: Sync
    on_pull: OnPull
    migration: Migrating
    throughput_ratio: float = 5.0  # see `Settings`
    layout: Callable[..., Layout] | None = None
    """Creates the layout of steps over instances; None: the rules use none."""
    batch_order: BatchOrder = "finished"
    accumulate_early: bool = False
    """Whether a batch's gradient is accumulated from its complete groups before all are."""


SCHEDULES: Mapping[str, Bundle] = {
    "synchronous": Bundle("lockstep", fewest_requests, when_idle, "drain", none),
    "one_step": Bundle("lockstep", fewest_requests, when_idle, "drain", none),
    "bounded": Bundle("protocol", fewest_requests, when_idle, "drain", none),
    "partial": Bundle("protocol", fewest_requests, greedy, "keep", none),
    "staleflow": Bundle("protocol", waterfall, greedy, "reroute", rebalance),
    "histopipe": Bundle("protocol", planned, when_idle, "keep", migrate_outliers, layout=Pipeline),
    "rhymeflow": Bundle(
        admission="protocol",
        routing=waterfall,
        sync=gather_stragglers,
        on_pull="reroute",
        migration=skip_nearly_done,
        throughput_ratio=3.0,
        batch_order="requested",
        accumulate_early=True,
    ),
}
"""`synchronous` and `one_step` differ only in their staleness bounds, 0 and 1, with which the
protocol has entries for one batch at a time or for two."""
