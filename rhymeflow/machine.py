"""Whether this machine has what a configuration asks for: cores to pin to, and memory.

Holds true: takes microseconds and loads no torch. Refuses only what cannot work here; what is
merely more than enough is for `sizes` to show.
"""

from __future__ import annotations

import os

from rhymeflow.config import Config
from rhymeflow.errors import UserError
from rhymeflow.utils.cores import can_stay_on

LEAST_PROCESS = 200_000_000
"""Bytes of its own that a rollout instance or a rank takes at least, for Python and torch alone."""

LEAST_SEQUENCE = 1_000
"""Bytes that an instance sets aside at least for each response it may decode at a time."""

HISTORY_TOKEN = 58
"""Bytes that the index of history takes for each token."""


def check_machine(config: Config) -> None:
    """Compare cores, instances, what they decode at a time, and history with this machine.

    Raises:
        UserError: there is no such core, or not the memory.
    """
    for field, cpus in _pinned(config):
        can_stay_on(cpus, field)
    instances, tokens = config.rollout.num_instances, config.drafting.history_tokens
    ranks = config.learner.num_ranks
    _check_memory(f"learner.num_ranks = {ranks:,}: so many processes take", ranks * LEAST_PROCESS)
    sequences = config.rollout.max_num_seqs
    _check_memory(
        f"rollout.num_instances = {instances:,}: so many processes take",
        instances * LEAST_PROCESS,
    )
    _check_memory(
        f"rollout.max_num_seqs = {sequences:,}: so many responses take", sequences * LEAST_SEQUENCE
    )
    if config.drafting.window != "off":
        _check_memory(
            f"drafting.history_tokens = {tokens:,}: their index takes", tokens * HISTORY_TOKEN
        )


def memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _pinned(config: Config) -> list[tuple[str, tuple[int, ...]]]:
    """Each field that names cores, with those it names."""
    each = [(f"rollout.cpus.{n}", cpus) for n, cpus in enumerate(config.rollout.cpus or ())]
    return each if config.learner.cpus is None else [("learner.cpus", config.learner.cpus), *each]


def _check_memory(what: str, num_bytes: int) -> None:
    if num_bytes > memory():
        raise UserError(
            f"{what} at least {num_bytes / 1e9:,.0f} GB, and this machine has "
            f"{memory() / 1e9:,.0f} GB of memory"
        )
