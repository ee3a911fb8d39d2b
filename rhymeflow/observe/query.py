"""Questions to a run, answered by plain records: dicts of JSON's values.

The terminal, the pages, JSON and exports show what is returned here, so they say the same. `step`
counts from 1, as people and metrics do; the store's versions count from 0."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rhymeflow.core.types import CUT, TrajectoryId
from rhymeflow.errors import UserError
from rhymeflow.observe import limits, metrics
from rhymeflow.store import codec
from rhymeflow.store.branches import Asked, sequences
from rhymeflow.store.damage import open_undamaged
from rhymeflow.store.previous_run import config_in_force, section_in_force
from rhymeflow.store.reader import StoredSegment, TrajectoryReader
from rhymeflow.store.schema import EVENTS, GIVEN, is_written
from rhymeflow.suites.figures import REWARD
from rhymeflow.utils.bounds import bound_of

if TYPE_CHECKING:
    from rhymeflow.config import ModelConfig
    from rhymeflow.observe.learning import Learning

Record = dict[str, Any]
Kind = Literal["best", "worst"]
Texts = Callable[[list[int]], list[str]]  # returns the text of each token
State = Literal["running", "ended", "stopped", "killed"]
"""`running`: its controller lives. `ended`: it did all its steps. `stopped`: its controller ended
it before that, upon Ctrl-C or an error. `killed`: its controller died."""

SUMMARY = "summary.json"
KINDS: tuple[Kind, ...] = ("best", "worst")

NO_DIFFERENCE = ("run.output_dir", "run.backup", "simulation")  # fields that do not tell runs apart
_LACKING = "(no such field)"
MAX_EPOCHS = 200  # groups of the same prompt in the answer about a group: the first ones
MAX_EARLIER = 20
"""Groups of the same prompt in earlier epochs in the answer about a response: the newest ones."""
SHOWN_PROMPT = 200  # characters of a prompt in lists of groups

CHOSEN = "IN (SELECT value FROM json_each(?1))"
"""What `{those}` of a statement may be: groups of a list in JSON."""

# A group's tokens are deleted whole: a response is in one of the two tables. Of one reward function
# alone the reward says all; rewards of several (`has_parts`) have a comma between them.
MEMBERS = f"""
SELECT s.group_id, s.member, s.length, s.observed, s.first_version, s.last_version, s.steps,
    s.drafted, t.reason, {GIVEN} AS reward, t.trained + 1 AS step,
    INSTR(t.components, ',') > 0 AS has_parts
FROM (SELECT group_id, member, SUM(LENGTH(tokens) / 4) AS length,
        SUM(LENGTH(tokens) / 4 * (steps = 0)) AS observed, MIN(version) AS first_version,
        MAX(version) AS last_version, SUM(steps) AS steps, SUM(drafted) AS drafted
        FROM segments WHERE group_id {{those}} GROUP BY group_id, member
    UNION ALL SELECT group_id, member, SUM(length), SUM(length * (steps = 0)), MIN(version),
        MAX(version), SUM(steps), SUM(drafted)
        FROM pruned WHERE group_id {{those}} GROUP BY group_id, member) s
LEFT JOIN trajectories t ON t.group_id = s.group_id AND t.member = s.member"""

_TOLD_MEMBERS = f"""SELECT m.*, t.text, t.components FROM ({MEMBERS}) m
    LEFT JOIN trajectories t USING (group_id, member)"""

_ENDED_IN = "SELECT group_id FROM groups WHERE ending_version = ? AND suite IS NULL"
_SAME_PROMPT = f"""SELECT group_id FROM groups
    WHERE row = ? AND suite IS (SELECT suite FROM groups WHERE group_id = ?)
    ORDER BY group_id LIMIT {MAX_EPOCHS}"""

_CUT = ", ".join(f"'{reason}'" for reason in CUT)
_GROUP = (
    *("group", "row", "epoch", "prompt", "ending", "ending_version", "ending_reason", "step"),
    *("responses", "rewarded", "cut", "reward", "reward_min", "reward_max", "length"),
    *("length_max", "staleness_max"),
)
# The last columns are not of `_GROUP`: tokens that were sampled, in how many iterations, how many
# were drafted, and whether there are rewards by function.
GROUPS = f"""
SELECT g.group_id, g.row, IIF(g.suite IS NULL, g.epoch, NULL) AS epoch,
    SUBSTR(g.prompt, 1, {SHOWN_PROMPT}) AS prompt, g.ending,
    g.ending_version, g.ending_reason,
    CASE WHEN g.ending = 'consumed' THEN g.ending_version + 1 END AS step,
    COUNT(m.member) AS responses, COUNT(m.reward) AS rewarded,
    COUNT(*) FILTER (WHERE m.reason IN ({_CUT})) AS cut, AVG(m.reward) AS reward,
    MIN(m.reward) AS reward_min, MAX(m.reward) AS reward_max, AVG(m.length) AS length,
    MAX(m.length) AS length_max, MAX(m.step - 1 - m.first_version) AS staleness_max,
    SUM(m.length - m.observed) AS sampled, SUM(m.steps) AS steps, SUM(m.drafted) AS drafted,
    MAX(m.has_parts) AS has_parts
FROM groups g LEFT JOIN ({MEMBERS}) m ON m.group_id = g.group_id
WHERE g.group_id {{those}} GROUP BY g.group_id"""


_TRAINED = """SELECT trained + 1, COUNT(*) FROM trajectories WHERE trained IS NOT NULL
    GROUP BY 1 ORDER BY 1"""
_ENDINGS = "SELECT COALESCE(ending, 'open'), COUNT(*) FROM groups WHERE suite IS NULL GROUP BY 1"
_FILTERED = "SELECT COUNT(*) FROM groups WHERE ending = 'filtered' AND ending_version = ?"
_ALL_MEMBERS = MEMBERS.format(those=">= 0")  # those below 0 are of suites
_TOTALS = f"""SELECT COUNT(step) AS trajectories,
    TOTAL(length - observed) FILTER (WHERE step IS NOT NULL) AS trained,
    TOTAL(length - observed) AS generated, TOTAL(steps) AS steps, TOTAL(drafted) AS drafted
    FROM ({_ALL_MEMBERS})"""
_STALENESS = f"""SELECT step - 1 - first_version, COUNT(*) FROM ({_ALL_MEMBERS})
    WHERE step IS NOT NULL GROUP BY 1 ORDER BY 1"""

# Of equal rewards other groups come before further members of one, and newer groups before older.
_BY_REWARD = """
SELECT group_id AS "group", member, {reward} AS reward, components, text, length, reason,
    trained + 1 AS step, ending, ending_reason, prompt, columns
FROM trajectories JOIN groups USING (group_id)
WHERE reward IS NOT NULL AND suite IS NULL AND (?1 IS NULL OR trained = ?1 - 1)
ORDER BY reward {order}, ROW_NUMBER() OVER (PARTITION BY group_id, reward ORDER BY member),
    group_id DESC
LIMIT ?2"""

_DETAILS = "SELECT logprobs, flags FROM token_details WHERE group_id = ? AND member = ?"
_ACCEPTED = """SELECT accepted, LENGTH(tokens) / 4, steps FROM segments
    WHERE group_id = ? AND member = ? ORDER BY start"""
_SIBLINGS = """SELECT member FROM segments WHERE group_id = ?1
    UNION SELECT member FROM pruned WHERE group_id = ?1 ORDER BY member"""
_EARLIER = f"""SELECT o.group_id AS "group", o.epoch FROM groups g
    JOIN groups o ON o.row = g.row AND o.suite IS g.suite AND o.epoch < g.epoch
    WHERE g.group_id = ? ORDER BY o.epoch DESC, o.group_id DESC LIMIT {MAX_EARLIER}"""
_RESPONSE = f"""SELECT g.row, IIF(g.suite IS NULL, g.epoch, NULL) AS epoch, g.prompt, g.columns,
    t.text, t.length, t.reason, {GIVEN} AS reward, t.components, t.trained + 1 AS step, g.ending,
    g.ending_reason
    FROM groups g LEFT JOIN trajectories t ON t.group_id = g.group_id AND t.member = ?2
    WHERE g.group_id = ?1"""
_SEGMENT = ("start", "length", "version", "instance", "steps", "drafted")

# -- the run ---------------------------------------------------------------------------------------


def overview(
    run_dir: Path,
    reader: TrajectoryReader,
    rows: Sequence[metrics.Row],
    verdicts: LiveVerdicts | None = None,
) -> Record:
    """Configuration, state, progress, limit and names of metrics (of `rows`): the part of `run`
    that the pages ask for every second. `verdicts`: those of the run so far."""
    attempts = reader.attempts()
    config = json.loads(attempts[-1].config) if attempts else {}
    max_steps = config.get("learner", {}).get("max_steps")
    limit = limits.of_rows(rows, bound(config)) if attempts else None
    events, seconds = reader.last_event()
    endings = dict(reader.query(_ENDINGS))
    times = {row["step"]: row["step_time"] for row in rows if row.get("step_time")}
    steps = max(times, default=0)
    return {
        "name": run_dir.resolve().name,
        "directory": str(run_dir.resolve()),
        "config": config,
        "attempts": [{"started": each.started, "time": each.time} for each in attempts],
        "steps": steps,
        "max_steps": max_steps,
        "left": (max_steps - steps) * fmean(times.values()) if times and max_steps else None,
        "bound": bound(config),
        "emulated": emulated(config),
        "seconds": seconds,
        "events": events,
        "groups": sum(endings.values()),
        "endings": endings,
        "ended": _has_ended(reader),
        "state": state_of(run_dir, reader),
        "limit": None if limit is None else {**vars(limit), "line": limit.line},
        "verdicts": (verdicts or LiveVerdicts()).after(reader, rows),
        "metrics": list(dict.fromkeys(name for row in rows for name in row)),
    }


def bound(config: Record) -> int:
    """The staleness bound of a run of this configuration."""
    schedule = config.get("schedule", {})
    return bound_of(schedule.get("name", ""), schedule.get("max_staleness"))


def emulated(config: Record) -> str:
    """What a run of this configuration emulates, whose times its times are; empty if nothing."""
    from rhymeflow.config.emulation import EmulationConfig

    return EmulationConfig.model_construct(**config.get("emulation", {})).said


def run(run_dir: Path, reader: TrajectoryReader, rows: Sequence[metrics.Row]) -> Record:
    """What `overview` says, and the run's last metrics and staleness."""
    steps = metrics.by_step(rows)
    return {
        **overview(run_dir, reader, rows),
        "latest": steps[max(steps)] if any(steps) else None,
        "held_out": [*map(list, held_out(steps).items())],
        "staleness": {str(versions): count for versions, count in staleness(reader).items()},
    }


class LiveVerdicts:
    """The verdicts on learning of a run that may go on. Takes in each row of metrics once; safe for
    threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._learning: Learning | None = None
        self._num_attempts = self._num_rows = 0

    def after(self, reader: TrajectoryReader, rows: Sequence[metrics.Row]) -> list[Record]:
        """Return the verdicts after these rows, which begin with those of the last call unless the
        run was resumed. `since`: the step from which it holds, None if the run has not said it."""
        from rhymeflow.observe.learning import Learning  # it imports the configuration

        with self._lock:
            num_attempts = len(reader.attempts())
            if not num_attempts:
                return []
            is_other = num_attempts != self._num_attempts or len(rows) < self._num_rows
            if self._learning is None or is_other:
                self._learning, self._num_rows = Learning(config_in_force(reader)), 0
            for row in rows[self._num_rows :]:
                self._learning.take(row["step"], row)
            self._num_attempts, self._num_rows = num_attempts, len(rows)
            ((filtered,),) = reader.query(_FILTERED, self._learning.last_step)
            self._learning.filtered(filtered)
            said = metrics.LiveRows(reader.path.parent / metrics.VERDICTS).rows()
            since = {row.get("name"): row["step"] for row in said}
            now = self._learning.at_end()
            return [each._asdict() | {"since": since.get(each.name)} for each in now]


def dated(verdict: Record) -> str:
    """What it says, with the step from which it holds."""
    since = verdict["since"]
    return verdict["said"] if since is None else f"{verdict['said']} (since step {since})"


def held_out(steps: Mapping[int, metrics.Row]) -> dict[int, float]:
    """{step: mean held-out reward}, of the steps that have one."""
    return {step: row[REWARD] for step, row in steps.items() if row.get(REWARD) is not None}


def staleness(reader: TrajectoryReader) -> dict[int, int]:
    """Responses trained on, by how many versions old their oldest token was."""
    return dict(reader.query(_STALENESS))


def totals(reader: TrajectoryReader) -> Record:
    """Sums over responses without held-out ones: `trajectories` trained on, their sampled tokens
    (`trained`); of all responses the sampled tokens (`generated`), iterations (`steps`) and
    `drafted` tokens."""
    return reader.records(_TOTALS)[0]


def trained(reader: TrajectoryReader) -> dict[int, int]:
    """{step: number of responses that it trained on}."""
    return dict(reader.query(_TRAINED))


def state_of(run_dir: Path, reader: TrajectoryReader) -> State:
    """The state of the run; see `State`."""
    if is_written(run_dir):
        return "running"
    if _has_ended(reader):
        return "ended"
    return "stopped" if _is_summarized(run_dir, reader.last_event()[1]) else "killed"


def _has_ended(reader: TrajectoryReader) -> bool:
    last = reader.query("SELECT kind FROM commands ORDER BY seq DESC LIMIT 1")
    return last == [("Finish",)]


def _is_summarized(run_dir: Path, seconds: float) -> bool:
    """Whether `summary.json` covers the last event, at `seconds`. In a resumed run it is that of
    the attempt before until the run ends."""
    file = run_dir / SUMMARY
    if not file.is_file():
        return False
    try:
        return bool(json.loads(file.read_text())["seconds"] >= round(seconds, 3))
    except ValueError as error:
        raise UserError(f"{file}: is not JSON: {error}") from None


def step(run_dir: Path, reader: TrajectoryReader, number: int) -> Record:
    """A step's metrics and groups. Raises `UserError` if the run has not reached it."""
    steps = metrics.read(run_dir)
    found = groups_of_step(reader, number) if number > 0 else []
    if number not in steps and not found:
        last = max(steps, default=None)
        how_far = "no step is complete" if last is None else f"the last one is {last}"
        raise UserError(f"{run_dir}: has no step {number}; {how_far}")
    row = steps.get(number, {})
    return {
        "step": number,
        "time": row.get("time"),
        "metrics": {name: row[name] for name in row if name not in ("step", "time")},
        "count": len(found),
        "groups": found,
    }


# -- runs beside each other ------------------------------------------------------------------------


def fields_of(path: Path) -> dict[str, Any]:
    """Return the configuration in force of the last attempt at the run in `path`, by the paths of
    its fields; lists are one value."""
    with open_undamaged(path / EVENTS) as reader:
        attempts = reader.attempts()
        found = _flat(json.loads(attempts[-1].config) if attempts else {})
    return {name: value for name, value in found.items() if not name.startswith(NO_DIFFERENCE)}


def _flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{path}{name}.")
        else:
            found[f"{path}{name}"] = value
    return found


def differences(fields: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return {path of a field: its value in each run} of the fields that differ."""
    names = dict.fromkeys(name for each in fields for name in each)
    found = {name: [each.get(name, _LACKING) for each in fields] for name in names}
    return {
        name: values
        for name, values in found.items()
        if any(type(each) is not type(values[0]) or each != values[0] for each in values)
    }


def changed(fields: Mapping[str, Any]) -> Record:
    """Compare a run's fields with the `recipe` that has its name, None where there is none and they
    are compared with the defaults: `fields` {path: the value there} of those that differ."""
    from rhymeflow.build import rules_in_force
    from rhymeflow.config.load import build_config, list_recipes, read_config

    recipe = fields["name"] if fields.get("name") in list_recipes() else None
    config = build_config({}, where="the defaults") if recipe is None else read_config(recipe)
    config = config.model_copy(update={"schedule": rules_in_force(config)})
    found = differences([_flat(config.model_dump(mode="json")), fields])
    theirs = {name: value for name, (value, _) in found.items() if name in fields}
    return {"recipe": recipe, "fields": theirs}


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return names that tell the paths apart: as many of their last parts as that takes."""
    parts = [path.resolve().parts for path in paths]
    for count in range(1, max(map(len, parts))):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [str(path) for path in paths]


# -- groups ----------------------------------------------------------------------------------------


def groups(reader: TrajectoryReader, chosen: Sequence[int], members: str = MEMBERS) -> list[Record]:
    """These groups in ascending order, each with its `members`, by this statement."""
    by_group: dict[int, list[Record]] = {}
    statement = f"{members.format(those=CHOSEN)} ORDER BY 1, 2"
    for member in reader.records(statement, json.dumps(list(chosen))):
        del member["has_parts"]
        by_group.setdefault(member.pop("group_id"), []).append(member)
    return [each | {"members": by_group.get(each["group"], [])} for each in _heads(reader, chosen)]


def _heads(reader: TrajectoryReader, chosen: Sequence[int]) -> list[Record]:
    """These groups without members."""
    rows = reader.query(GROUPS.format(those=CHOSEN), json.dumps(list(chosen)))
    return [dict(zip(_GROUP, row, strict=False)) for row in rows]


def groups_of_step(reader: TrajectoryReader, step: int) -> list[Record]:
    """Groups that ended in `step`: its batch, and those left out while its version was the newest.
    The widest spread of rewards comes first; groups without rewards come last."""
    with reader.one_state():
        ended = reader.query(_ENDED_IN, step - 1)
        found = groups(reader, [group for (group,) in ended])

    def spread(group: Record) -> float:
        is_known = group["reward"] is not None
        return float(group["reward_max"] - group["reward_min"]) if is_known else -1.0

    return sorted(found, key=lambda group: (-spread(group), group["group"]))


def whole_groups(reader: TrajectoryReader, chosen: Sequence[int]) -> list[Record]:
    """These groups with their whole prompts and columns, and responses with their texts and rewards
    by function."""
    with reader.one_state():
        found = groups(reader, chosen, _TOLD_MEMBERS)
        rows = reader.query(
            f"SELECT prompt, columns FROM groups WHERE group_id {CHOSEN} ORDER BY group_id",
            json.dumps(list(chosen)),
        )
    for each, (prompt, columns) in zip(found, rows, strict=True):
        each |= {"prompt": codec.prompt_of(prompt), "columns": json.loads(columns)}
        for member in each["members"]:
            member["components"] = _components(member["components"])
    return found


def group(reader: TrajectoryReader, number: int) -> Record:
    """One group, and the groups of the same prompt in all epochs. Raises `UserError` if there is no
    such group."""
    found = whole_groups(reader, [number])
    if not found:
        ((last,),) = reader.query("SELECT MAX(group_id) FROM groups")
        how_far = "there are none yet" if last is None else f"they go to {last}"
        raise UserError(f"{reader.path.parent}: has no group {number}; {how_far}")
    same = reader.query(_SAME_PROMPT, found[0]["row"], number)
    epochs = _heads(reader, [each for (each,) in same])
    names = ("group", "epoch", "step", "reward", "length")
    return {**found[0], "epochs": [{name: each[name] for name in names} for each in epochs]}


_ALL_GROUPS = GROUPS.format(those=">= 0")


def drafts_by_epoch(reader: TrajectoryReader, among: str = _ALL_GROUPS) -> list[Record]:
    """`draft_figures` of each epoch; `among`: rows of `GROUPS`, as SQL."""
    rows = reader.query(
        "SELECT epoch, SUM(sampled), SUM(steps), SUM(drafted)"
        f" FROM ({among}) WHERE steps > 0 GROUP BY epoch ORDER BY epoch"
    )
    return [{"epoch": epoch, **draft_figures(*sums)} for epoch, *sums in rows]


def draft_figures(sampled: int, steps: float, drafted: float) -> Record:
    """Figures of sampled tokens, their iterations (`steps`) and the tokens drafted in them:
    `acceptance_length`, tokens per iteration, and `acceptance_rate` of drafted tokens. An iteration
    makes one token without any draft."""
    return {
        "tokens": sampled,
        "drafted": round(drafted),
        "acceptance_length": sampled / steps if steps else None,
        "acceptance_rate": (sampled - steps) / drafted if drafted else None,
    }


# -- responses -------------------------------------------------------------------------------------


def rewarded(
    reader: TrajectoryReader, kind: Kind, number: int, step: int | None = None
) -> list[Record]:
    """The `number` responses with the best or worst rewards, of a step or (None) of the run."""
    statement = _BY_REWARD.format(reward=GIVEN, order="ASC" if kind == "worst" else "DESC")
    rows = reader.records(statement, step, number)
    return [_read(row) for row in rows]


def response(run_dir: Path, reader: TrajectoryReader, trajectory: TrajectoryId) -> Record:
    """One response. Lists have an entry per token; None where tokens were deleted
    (`run.keep_tokens`) or the run kept no details (`run.token_details`). Raises `UserError` if
    there is no such response."""
    with reader.one_state():
        rows, segments = reader.records(_RESPONSE, *trajectory), reader.segments(trajectory)
        if not rows or (not segments and rows[0]["length"] is None):
            ((count,),) = reader.query("SELECT COUNT(DISTINCT group_id) FROM spans")
            raise UserError(f"{run_dir}: has no trajectory {trajectory}; {count} groups have any")
        learner, flags = _learner(reader, trajectory)
        accepted = _accepted(reader, trajectory)
        siblings = reader.query(_SIBLINGS, trajectory.group)
        earlier = reader.records(_EARLIER, trajectory.group)
    return {
        "directory": str(run_dir),
        "group": trajectory.group,
        "member": trajectory.member,
        **_read(rows[0]),
        "calls": _calls(segments),
        "segments": [
            {name: getattr(each, name) for name in _SEGMENT} | {"observed": each.is_observed}
            for each in segments
        ],
        "tokens": [token for each in segments for token in each.tokens] or None,
        "logprobs": [value for each in segments for value in each.logprobs] or None,
        "learner_logprobs": learner,
        "flags": flags,
        "accepted": accepted,
        "siblings": [member for (member,) in siblings],
        "earlier": earlier,
    }


def _calls(segments: Sequence[StoredSegment]) -> list[Record]:
    """Each call of an agent's response, from 1: where it starts, the call that it continues (None:
    it begins a conversation), and the sequence, from 1, in which its turn is in the loss."""
    calls = [
        Asked(each.start, each.start + each.length, each.follows)
        for each in segments
        if each.follows is not None
    ]
    if not calls:
        return []
    length = segments[-1].start + segments[-1].length
    ends = [*(each.start for each in calls[1:]), length]
    by_end = {end: number for number, end in enumerate(ends, 1)}
    trained: dict[int, int] = {}
    for number, parts in enumerate(sequences(calls, length), 1):
        for start, _ in parts:
            trained.setdefault(start, number)
    return [
        {
            "call": number,
            "start": each.start,
            "continues": by_end.get(each.follows),
            "sequence": trained.get(each.start),
        }
        for number, each in enumerate(calls, 1)
    ]


def _read(stored: Record) -> Record:
    """The same row with its JSON decoded."""
    return stored | {
        "prompt": codec.prompt_of(stored["prompt"]),
        "columns": json.loads(stored["columns"]),
        "components": _components(stored["components"]),
    }


def _components(stored: str | None) -> Any:
    return None if stored is None else json.loads(stored)


def _learner(
    reader: TrajectoryReader, trajectory: TrajectoryId
) -> tuple[list[float] | None, list[int] | None]:
    for logprobs, flags in reader.query(_DETAILS, *trajectory):
        found = None if logprobs is None else np.frombuffer(logprobs, "<f4").tolist()
        return found, list(flags)
    return None, None


def _accepted(reader: TrajectoryReader, trajectory: TrajectoryId) -> list[int] | None:
    """Per token 1 if it was drafted and accepted; None if any segment does not say."""
    found: list[int] = []
    for accepted, length, steps in reader.query(_ACCEPTED, *trajectory):
        if accepted is None and steps:
            return None
        found += accepted or [0] * length
    return found or None


def load_texts(model: ModelConfig) -> Texts:
    """Return what decodes tokens one by one. Raises `UserError` if there is no such tokenizer."""
    from rhymeflow.models.tokenizer import load_tokenizer  # loads transformers

    tokenizer = load_tokenizer(model)
    return lambda tokens: [
        str(tokenizer.decode([token], skip_special_tokens=False)) for token in tokens
    ]


class TokenTexts:
    """Loads the tokenizers of runs on first use and keeps them; safe for threads."""

    def __init__(self, load: Callable[[ModelConfig], Texts] = load_texts) -> None:
        self._load, self._lock = load, threading.Lock()
        self._known: dict[Path, Texts | None] = {}

    def of(self, reader: TrajectoryReader, tokens: list[int]) -> list[str] | None:
        """The text of each token; None if the run's tokenizer cannot be loaded here."""
        with self._lock:
            if reader.path not in self._known:
                if not reader.attempts():
                    return None
                try:
                    self._known[reader.path] = self._load(section_in_force(reader, "model"))
                except UserError:
                    self._known[reader.path] = None
            texts = self._known[reader.path]
        return None if texts is None else texts(tokens)
