"""Copies what is new of a run to its mirror, once each time it is asked to.

Holds true: an object of the log is written after all that it names (tokens, checkpoints, a state of
the coordinator), and one that is whole names a checkpoint from which the log's tokens go on. The
store is only read; what waits to be copied is in it and takes no memory. Knows nothing of when it
is called.
"""

from __future__ import annotations

import hashlib
from contextlib import closing
from pathlib import Path

import msgspec

from rhymeflow.mirror import lineage as lineages
from rhymeflow.mirror.objects import Beginning, Position, Tree, digest, pack
from rhymeflow.mirror.remote import Remote, Unreachable
from rhymeflow.mirror.rows import Part, read_part
from rhymeflow.mirror.trees import Trees, version_of
from rhymeflow.store import mirrored, schema
from rhymeflow.store.mirrored import Mirrored
from rhymeflow.store.schema import EVENTS, SCHEMA_VERSION

FILES = ("config.yaml", "metrics.jsonl", "trackers.json")
SNAPSHOTS_KEPT = 2


class Shipper:
    """Of one attempt at the run in `run_dir`, in one thread."""

    def __init__(self, run_dir: Path, remote: Remote) -> None:
        self._run_dir, self._remote = run_dir, remote
        self._connection = schema.open_for_reading(run_dir / EVENTS)
        self._sent: dict[str, str] = {}
        """Digests of small files as they were copied."""
        self._forgotten: list[str] = []
        """What may be deleted once the log does not name it any more."""
        self.state = self._known() or self._unknown()
        self._is_begun = False
        self._ends_whole = False
        """Whether the last object of the lineage is."""
        copied = {path: msgspec.convert(tree, Tree) for path, tree in self.state.trees.items()}
        self._trees = Trees(run_dir, remote, self._of_this_log(copied))

    def ship(self) -> bool:
        """Copy all that is new; whether a run can be resumed from all of that.

        Raises:
            Unreachable: the mirror; what was copied until then is not copied again.
        """
        self._begin()
        while True:
            self._trees.advance(self.state.lineage)
            position = Position(**self.state.position)
            part = read_part(self._connection, position, max(self.state.snapshots, default=0))
            if part.log.is_whole and not self._can_be_resumed(part):
                return False
            if part.log.is_whole:
                self._ship_files()  # metrics have a step's row before the log has the step
            has_trees = self._trees.copied.keys() != self.state.trees.keys()
            if not part.is_empty or has_trees or not self._ends_whole:
                self._send(part)
            if part.log.is_whole:
                self._take_away()
                return not self._trees.is_busy

    def close(self) -> None:
        """Release what it holds."""
        self._trees.close()
        self._connection.close()

    # -- where it begins -----------------------------------------------------------------------

    def _known(self) -> Mirrored | None:
        """What is in the mirror by what was noted, if this is still the log that it was noted of.

        A log whose end was lost with the power, and that went on otherwise, is not.
        """
        found = mirrored.read(self._run_dir)
        if found is None or found.url != self._remote.url or found.run != self._run():
            return None
        position = Position(**found.position)
        for table in ("events", "commands", "changes"):
            (last,) = self._ask(f"SELECT COALESCE(MAX(seq), 0) FROM {table}")
            if last < getattr(position, table):
                return None
        if found.mark is None:
            return found
        seq, time = found.mark
        return found if self._ask("SELECT time FROM events WHERE seq = ?", seq) == (time,) else None

    def _unknown(self) -> Mirrored:
        position = msgspec.to_builtins(Position())
        return Mirrored(self._remote.url, self._run(), "", 0, position, None)

    def _run(self) -> str:
        """What the run is known by: how and when it first began."""
        begun = "SELECT started, config FROM attempts ORDER BY attempt LIMIT 1"
        started, config = self._ask(begun)
        seed = msgspec.json.decode(config)["run"]["seed"]
        return hashlib.blake2b(f"{started} {seed}".encode(), digest_size=8).hexdigest()

    def _of_this_log(self, copied: dict[str, Tree]) -> dict[str, Tree]:
        """Without checkpoints that were ahead of where the log goes on."""
        found = (
            "SELECT COALESCE(MAX(json_extract(body, '$.version')), 0) FROM events WHERE kind = ?"
        )
        (published,) = self._ask(found, "VersionPublished")
        return {p: tree for p, tree in copied.items() if (version_of(p) or 0) <= published}

    def _ask(self, query: str, *values: object) -> tuple:
        with closing(self._connection.execute(query, values)) as cursor:
            return cursor.fetchone()

    def _begin(self) -> None:
        """Begin a lineage, the first time that the mirror can be reached."""
        if self._is_begun:
            return
        there = lineages.read_all(self._remote)
        others = sorted(name for name, found in there.items() if found.run != self.state.run)
        if others:
            raise Unreachable(f"it holds another run ({others[0]}); name another place")
        previous = (self.state.lineage, self.state.number) if self.state.number else None
        if previous is not None and previous[0] not in there:
            self.state, previous = self._unknown(), None  # somebody emptied it
            self._trees.copied = {}
        (attempt,) = self._ask("SELECT MAX(attempt) FROM attempts")
        beginning = Beginning(self.state.run, SCHEMA_VERSION, attempt, previous, tuple(there))
        self.state.lineage, self.state.number = lineages.begin(self._remote, beginning), 0
        self._is_begun = True

    # -- copying -------------------------------------------------------------------------------

    def _can_be_resumed(self, part: Part) -> bool:
        """Whether the mirror has a checkpoint for the tokens that are left."""
        versions = (version_of(path) for path in self._trees.copied)
        oldest, newest = part.log.pruned_before, part.log.published
        return not oldest or any(v is not None and oldest <= v <= newest for v in versions)

    def _send(self, part: Part) -> None:
        log, number = part.log, self.state.number + 1
        if part.snapshot is not None:
            event, state = part.snapshot
            name = f"{self.state.lineage}/snapshots/{event}-{digest(state)}"
            self._remote.put(name, state)
            self.state.snapshots[event] = name
        for event in sorted(self.state.snapshots)[:-SNAPSHOTS_KEPT]:
            self._forgotten.append(self.state.snapshots.pop(event))
        for path in self._trees.outdated():
            self._forgotten.append(self._trees.copied.pop(path).place)
        tokens = pack(part.tokens)
        if part.tokens.segments or part.tokens.texts or part.tokens.details:
            log.tokens = digest(tokens)
            self._remote.put(lineages.tokens_name(self.state.lineage, number), tokens)
        log.number, log.snapshots, log.trees = number, self.state.snapshots, self._trees.copied
        self._remote.put(lineages.log_name(self.state.lineage, number), pack(log))
        self._note(part)

    def _note(self, part: Part) -> None:
        log, state = part.log, self.state
        self._ends_whole = log.is_whole
        state.number, state.position = log.number, msgspec.to_builtins(log.position)
        state.trees = msgspec.to_builtins(log.trees)
        if log.rows["events"]:
            state.mark = tuple(log.rows["events"][-1][:2])
        if log.is_whole:
            state.whole = part.last_event
        state.problem = None
        mirrored.write(self._run_dir, state)

    def _take_away(self) -> None:
        """Delete what the log has ceased to name."""
        while self._forgotten:
            self._remote.remove(self._forgotten[-1])
            self._forgotten.pop()

    def _ship_files(self) -> None:
        for name in FILES:
            path = self._run_dir / name
            data = path.read_bytes() if path.is_file() else None
            if data is not None and self._sent.get(name) != digest(data):
                self._remote.put(f"{self.state.lineage}/files/{name}", pack(data))
                self._sent[name] = digest(data)
