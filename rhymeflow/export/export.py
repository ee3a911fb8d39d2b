"""`rhymeflow export`: what a run generated, to a file that other programs read; what is left out
is counted and said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rhymeflow.errors import UserError
from rhymeflow.export import formats
from rhymeflow.export.rows import GROUPS_AT_ONCE, NO_TEXT, Choice, Filters, Rows
from rhymeflow.export.turns import TurnReader
from rhymeflow.observe.query import Record
from rhymeflow.store.damage import open_undamaged
from rhymeflow.store.previous_run import section_in_force, store_of
from rhymeflow.store.reader import TrajectoryReader

WHAT = ("trajectories", "sft", "preferences")

_COMPONENTS = """SELECT DISTINCT key FROM trajectories, json_each(components)
    WHERE group_id BETWEEN ? AND ?"""


@dataclass(frozen=True)
class Export:
    """What was written, and what was not."""

    path: Path
    rows: int
    responses: int
    left_out: dict[str, int]
    notes: dict[str, int]
    """Rows of `trajectories` by what they lack."""

    def line(self) -> str:
        """The same in a line."""
        text = f"{self.path}: {self.rows:,} rows of {self.responses:,} responses"
        for title, counts in (("left out", self.left_out), ("among them", self.notes)):
            if counts:
                parts = ", ".join(f"{number:,} {what}" for what, number in counts.items())
                text += f"; {title}: {parts}"
        return text


def export(
    run_dir: Path,
    output: Path,
    *,
    what: str = "trajectories",
    kind: str | None = None,
    filters: Filters | None = None,
    with_tokens: bool = False,
    force: bool = False,
) -> Export:
    """Write rows of the run in `run_dir` to `output`.

    `what`: one of `WHAT`. `kind`: one of `formats.FORMATS`; `None`: what the name of `output` says.
    `with_tokens`: with trajectories, values for each token too. `force`: replace what is there.

    Raises:
        UserError: there is no run, options do not go together, nothing would be written, or what is
            needed for it is missing.
    """
    filters = filters or Filters()
    _check(what, filters, with_tokens)
    kind = formats.format_of(output, kind, force)
    with open_undamaged(store_of(run_dir)) as reader:
        choice = Choice(reader, filters, is_text_needed=what != "trajectories")
        notes: Counter[str] = Counter()
        rows = Rows(reader, section_in_force(reader, "data"), choice, _turn_reader(reader))
        found: Iterator[Record]
        components: list[str] = []
        if what == "trajectories":
            found = (_noted(row, notes) for row in rows.trajectories(with_tokens=with_tokens))
            components = _components(reader)
        else:
            found = rows.sft() if what == "sft" else rows.preferences()
        number = formats.write(output, kind, found, components, str(run_dir))
    left_out = {why: count for why, count in choice.left_out.items() if count}
    if not number:
        parts = ", ".join(f"{count:,} {why}" for why, count in left_out.items())
        raise UserError(f"{run_dir}: no row of {what} to write: {parts or 'there is no response'}")
    return Export(output, number, choice.seen, left_out, dict(notes))


def _check(what: str, filters: Filters, with_tokens: bool) -> None:
    if with_tokens and what != "trajectories":
        raise UserError(f"--tokens: goes with --what trajectories; given {what}")
    if filters.best is not None and what == "preferences":
        raise UserError("--best: a pair is the best and the worst of its group already")


def _turn_reader(reader: TrajectoryReader) -> TurnReader | None:
    environment = section_in_force(reader, "environment")
    if not (environment.classes or environment.tools):
        return None
    from rhymeflow.models.tokenizer import load_tokenizer  # loads transformers

    return TurnReader(load_tokenizer(section_in_force(reader, "model")))


def _components(reader: TrajectoryReader) -> list[str]:
    """Names of reward functions that responses have rewards of, in the order they are met."""
    ((last,),) = reader.query("SELECT COALESCE(MAX(group_id), -1) FROM groups")
    found: dict[str, None] = {}
    for start in range(0, last + 1, GROUPS_AT_ONCE):
        rows = reader.query(_COMPONENTS, start, start + GROUPS_AT_ONCE - 1)
        found |= dict.fromkeys(name for (name,) in rows)
    return list(found)


def _noted(row: Record, notes: Counter[str]) -> Record:
    if row["ending"] == "aborted":
        notes["aborted"] += 1
    if row["reason"] is None:
        notes["not complete"] += 1
    elif row["response"] is None:
        notes[NO_TEXT] += 1
    if row.get("tokens", ()) is None:
        notes["without tokens (run.keep_tokens)"] += 1
    return row
