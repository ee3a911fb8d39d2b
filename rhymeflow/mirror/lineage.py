"""Lineages: which part of a mirror belongs to which attempt at a run, and what follows what.

An attempt writes below a name of its own, and says which lineage it goes on from, up to which
object. So a controller that was taken for dead, and is not, cannot write into what goes on
elsewhere: what it still writes is in a lineage that is over.

    NAME/beginning            what it is
    NAME/log/00000001         objects of the log, in order
    NAME/tokens/00000001      the tokens that came with them
    NAME/snapshots/EVENT-...  states of the coordinator
    NAME/trees/PATH/...       checkpoints, and what else is a directory
    NAME/files/...            config.yaml, metrics.jsonl, trackers.json

Holds true: of a mirror that one controller at a time wrote to, one lineage is the newest. Knows
nothing of what objects hold.
"""

from __future__ import annotations

import uuid
from typing import NamedTuple

from rhymeflow.errors import UserError
from rhymeflow.mirror.objects import Beginning, Damaged, pack, unpack
from rhymeflow.mirror.remote import Remote

BEGINNING = "beginning"


class Link(NamedTuple):
    """A lineage, as far as what follows goes on from it."""

    name: str
    last: int | None
    """The number of the last object that counts; None: all that are there."""


def log_name(lineage: str, number: int) -> str:
    """Where an object of the log is."""
    return f"{lineage}/log/{number:08d}"


def tokens_name(lineage: str, number: int) -> str:
    """Where the tokens are that came with it."""
    return f"{lineage}/tokens/{number:08d}"


def begin(remote: Remote, beginning: Beginning) -> str:
    """Begin a lineage; return its name. Raises `Unreachable`."""
    name = f"{beginning.attempt:04d}-{uuid.uuid4().hex[:12]}"
    remote.put(f"{name}/{BEGINNING}", pack(beginning))
    return name


def read_all(remote: Remote) -> dict[str, Beginning]:
    """All lineages of a mirror. One whose beginning was not written whole has nothing in it.

    Raises:
        Unreachable: the mirror cannot be read.
    """
    found = {}
    for name in remote.names(""):
        data = remote.get(f"{name}/{BEGINNING}")
        if data is None:
            continue
        try:
            found[name] = unpack(data, Beginning)
        except Damaged:
            continue
    return found


def newest(lineages: dict[str, Beginning], url: str) -> str:
    """The one that is not over.

    Raises:
        UserError: two go on from the same place.
    """
    over = {name for beginning in lineages.values() for name in beginning.over}
    heads = sorted(lineages.keys() - over)
    if len(heads) != 1:
        raise UserError(
            f"{url}: holds {len(heads)} continuations of this run, {' and '.join(heads)}: delete "
            "all but the one that is to go on"
        )
    return heads[0]


def chain(lineages: dict[str, Beginning], head: str) -> list[Link]:
    """The lineages that make up a run until now, in order."""
    found, link = [], Link(head, None)
    while True:
        found.append(link)
        previous = lineages[link.name].previous
        if previous is None or previous[0] not in lineages:
            return found[::-1]
        link = Link(*previous)
