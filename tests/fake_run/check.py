"""What must hold of a fake run in the end, whatever happened to it.

The audit that users have (`examples/audit_run.py`) finds nothing wrong, and, because more is known
of a fake run: each token is the one that its noise gives, none that was committed is missing,
rewards are those of the tokens, prompts came in the data's order, every version has one checksum,
suites are answered, and the log gives its commands from its beginning as from each snapshot.
"""

from __future__ import annotations

import importlib.util
import json
import sqlite3
from collections import Counter, defaultdict
from contextlib import closing
from pathlib import Path
from statistics import fmean
from types import ModuleType, SimpleNamespace
from typing import Any

from benchmarks.training.train import ROOT
from rhymeflow.build import plan
from rhymeflow.config import Config
from rhymeflow.core.events import (
    EnvironmentFailed,
    Evaluated,
    GroupCreated,
    LearnerReady,
    RewardFailed,
    TrajectoryRewarded,
    VersionPublished,
)
from rhymeflow.data.stream import PromptStream
from rhymeflow.engine.base import NoiseKey
from rhymeflow.histospec.noise_sharing import epoch_of_noise
from rhymeflow.observe import metrics
from rhymeflow.observe.audit import audit_run
from rhymeflow.runtime.replay import configured, replay
from rhymeflow.store.branches import Asked
from rhymeflow.store.previous_run import config_of
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.schema import EVENTS
from rhymeflow.suites.suite import of_run
from tests.fake_run import agents, environments, models
from tests.fake_run.models import HELD_OUT, SOURCE
from tests.fake_run.world import World

COMPARE_SHARE = 0.2
"""Of resumed attempts, those before which the log is replayed from its beginning, too."""
LENGTHS = """SELECT group_id, member, SUM(length) FROM (
        SELECT group_id, member, LENGTH(tokens) / 4 AS length FROM segments UNION ALL
        SELECT group_id, member, length FROM pruned) GROUP BY 1, 2"""


def _audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit_run", ROOT / "examples/audit_run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


AUDIT = _audit()


class Seen:
    """What was in the store when attempts ended."""

    def __init__(self) -> None:
        self.num_attempts = 0
        self.lengths: dict[tuple[int, int], int] = {}
        """The most tokens that a response ever had in the store."""

    def look(self, run_dir: Path, committed: int, world: World) -> None:
        """An attempt has ended; `committed`: the last event that it had committed, if that is sure
        to be there.
        """
        with closing(TrajectoryReader(run_dir / EVENTS)) as reader:
            ((last,),) = reader.query("SELECT COALESCE(MAX(seq), 0) FROM events")
            assert last >= committed, f"event {committed} was committed and is not there"
            for group, member, length in reader.query(LENGTHS):
                known = self.lengths.get((group, member), 0)
                assert length >= known, f"tokens of {group}.{member} were lost"
                self.lengths[group, member] = length
            if last and reader.snapshots() and world.chance(COMPARE_SHARE):
                compare_with_whole_replay(run_dir / EVENTS)
                audited(run_dir / EVENTS)


class WithoutSnapshots(TrajectoryReader):
    """A log that is replayed from its beginning."""

    def snapshots(self) -> list[tuple[int, bytes]]:
        return []


def compare_with_whole_replay(path: Path) -> None:
    """A snapshot and the events since give what all events give."""
    with closing(TrajectoryReader(path)) as tail, closing(WithoutSnapshots(path)) as whole:
        short, long = replay(tail, path), replay(whole, path)
        config = config_of(tail.attempts()[-1], path)
    # As resuming does next. An attempt without events is in a snapshot of its time only.
    for past in (short, long):
        configured(config, past.coordinator)
    assert short._replace(coordinator=None) == long._replace(coordinator=None)
    assert plain(short.coordinator.state) == plain(long.coordinator.state)


def plain(value: Any) -> Any:
    """An object as containers of plain values, to be compared."""
    if isinstance(value, dict):
        return [(plain(key), plain(item)) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, list | tuple) or type(value).__name__ == "deque":
        return [plain(item) for item in value]
    if callable(value) or isinstance(value, str | int | float | None):
        return repr(value) if callable(value) else value
    names = [*getattr(value, "__dict__", {}), *getattr(type(value), "__slots__", ())]
    return [(name, plain(getattr(value, name))) for name in names if name not in SHARED]


SHARED = ("plan", "schedule", "generated", "memo")
"""What a state does not hold itself: a configuration made it, it leads back to the state, or it is
what strategies keep, which must not matter."""


def ended(run_dir: Path, config: Config, seen: Seen) -> None:
    path = run_dir / EVENTS
    assert audited(path).is_over
    compare_with_whole_replay(path)
    with closing(TrajectoryReader(path)) as reader:
        check_tokens(reader, config, seen)
        check_order(reader, config)
        check_versions(reader, config)
        check_answers(reader, config)
    steps = [
        row["step"]
        for row in map(json.loads, (run_dir / metrics.FILE).read_text().splitlines())
        if "loss" in row
    ]
    assert steps == list(range(1, config.learner.max_steps + 1)), f"metrics of {steps}"


def audited(path: Path) -> SimpleNamespace:
    """Let the audit that users have look at the log, which may end anywhere."""
    AUDIT.wrong.clear()
    with closing(sqlite3.connect(path)) as db:
        ((bound,),) = db.execute(
            "SELECT json_extract(config, '$.schedule.max_staleness') FROM attempts LIMIT 1"
        )
        log = AUDIT.read(db)
        AUDIT.law_1(db, log, bound)
        AUDIT.law_2(db, log)
        AUDIT.law_5(db, log)
    assert not AUDIT.wrong, "\n".join(AUDIT.wrong)
    with closing(TrajectoryReader(path)) as reader:
        counted = audit_run(reader)
    assert counted.is_clean, counted.line
    return log


def check_tokens(reader: TrajectoryReader, config: Config, seen: Seen) -> None:
    configs = {None: config} | {each.name: each.config for each in of_run(config)}
    rows = reader.query("SELECT group_id, row, epoch, suite FROM groups")
    origins = {group: origin for group, *origin in rows}
    stored, calls = _stored(reader)
    lengths = {(group, member): length for group, member, length in reader.query(LENGTHS)}
    check_pruned(reader, config, set(stored))
    for (group, member), length in seen.lengths.items():
        there = lengths.get((group, member), 0)
        assert there >= length, f"{length - there} tokens of {group}.{member} were lost"
    expected = {}
    for (group, member), tokens in stored.items():
        row, epoch, suite = origins[group]
        key = NoiseKey(row, epoch_of_noise(config, epoch, member), member)
        if config.environment.agent:
            most = configs[suite].rollout.max_completion_length
            agents.check_response(tokens, calls[group, member], key, most)
            expected[group, member] = environments.Conversation(tokens, [])
            continue
        whole = expected[group, member] = environments.conversation(key, configs[suite])
        there = whole.tokens[: len(tokens)]
        assert tokens == there, f"{group}.{member} has tokens of another response"
    for group, member, length, reason, reward, components in reader.query(
        "SELECT group_id, member, length, reason, reward, components FROM trajectories"
    ):
        there = lengths[group, member]
        assert there == length, f"{group}.{member}: {there} tokens of {length}"
        if (group, member) not in stored:
            continue
        tokens, whole = stored[group, member], expected[group, member]
        own = configs[origins[group][2]]
        if reason != "finished_early":
            assert tokens == whole.tokens, f"{group}.{member} ended before its end"
        elif own.environment.is_used:
            continue  # how far its environment was is not seen here
        if reward is not None:
            due = models.reward(tokens) * len(own.reward.functions)
            if own.environment.agent:
                due += json.loads(components)["agent"]
            elif own.environment.is_used:
                due += environments.judged(whole.turns)
            assert reward == due, f"{group}.{member} has the reward {reward}, not {due}"


def _stored(
    reader: TrajectoryReader,
) -> tuple[dict[tuple[int, int], list[int]], dict[tuple[int, int], list[Asked]]]:
    """The tokens of each response, and its calls if it is an agent's."""
    stored: dict[tuple[int, int], list[int]] = {}
    calls: dict[tuple[int, int], list[Asked]] = defaultdict(list)
    for group, member, start, blob, follows in reader.query(
        "SELECT group_id, member, start, tokens, follows FROM segments ORDER BY 1, 2, 3"
    ):
        tokens = stored.setdefault((group, member), [])
        assert start == len(tokens), f"{group}.{member} has a hole or an overlap at {start}"
        tokens += list(memoryview(blob).cast("i"))
        if follows is not None:
            calls[group, member].append(Asked(start, len(tokens), follows))
    return stored, calls


def check_pruned(reader: TrajectoryReader, config: Config, stored: set[tuple[int, int]]) -> None:
    """What was deleted may be, whole, without holes in what is left to know of it."""
    ends: dict[tuple[int, int], int] = {}
    for group, member, start, length in reader.query(
        "SELECT group_id, member, start, length FROM pruned ORDER BY 1, 2, 3"
    ):
        assert start == ends.get((group, member), 0), f"{group}.{member} has a hole at {start}"
        ends[group, member] = start + length
    gone = {group for group, _ in ends}
    assert not gone & {group for group, _ in stored}, "groups are half deleted"
    last = config.learner.max_steps - (config.run.keep_tokens or 0)
    kept = config.run.keep_tokens is None
    for group, version in reader.query("SELECT group_id, ending_version FROM groups"):
        assert group not in gone or (not kept and version < last), f"{group} was to be kept"


def check_order(reader: TrajectoryReader, config: Config) -> None:
    stream = PromptStream(SOURCE, config.run.seed, config.data.shuffle)
    created = [e for _, _, e in reader.events() if isinstance(e, GroupCreated)]
    groups = sorted(reader.query("SELECT group_id, row, epoch FROM groups WHERE suite IS NULL"))
    assert [(e.group, e.prompt, e.epoch) for e in sorted(created, key=lambda e: e.group)] == groups
    taken = [(e.prompt, e.epoch) for e in created if e.repeats is None]
    due = [stream.at(number) for number in range(len(taken))]
    assert taken == [(prompt.row, epoch) for epoch, prompt in due], "prompts out of order"


def check_versions(reader: TrajectoryReader, config: Config) -> None:
    """Every version was published, and has one checksum."""
    known: dict[int, str] = {}
    for _, _, event in reader.events():
        if isinstance(event, LearnerReady | VersionPublished):
            before = known.setdefault(event.version, event.checksum)
            assert before == event.checksum, f"version {event.version} is not what it was"
    assert sorted(known) == list(range(config.learner.max_steps + 1))


def check_answers(reader: TrajectoryReader, config: Config) -> None:
    """The last version was evaluated; what was found, of whatever version, is of all answers but
    those that failed."""
    events = [event for _, _, event in reader.events()]
    judged: dict[tuple[int, int], float | None] = {}
    for event in events:
        if isinstance(event, TrajectoryRewarded | RewardFailed | EnvironmentFailed):
            judged[event.trajectory] = getattr(event, "reward", None)
    answers = reader.query("SELECT group_id, sample, reward FROM evaluations")
    stored = {(group, sample): reward for group, sample, reward in answers}
    rows, rewards = defaultdict(list), defaultdict(list)
    num_answers = {each.name: each.n for each in of_run(config)}
    for group, suite, row, version in reader.query(
        "SELECT group_id, suite, row, ending_version FROM groups WHERE ending = 'evaluated'"
    ):
        rows[suite, version].append(row)
        for answer in ((group, sample) for sample in range(num_answers[suite])):
            if (reward := judged[answer]) is not None:
                assert stored[answer] == reward
                rewards[suite, version].append(reward)
    evaluated = [event for event in events if isinstance(event, Evaluated)]
    due = plan(config).evaluations([config.learner.max_steps])
    assert due <= {(each.version, each.suite) for each in evaluated}
    held = Counter((each.suite, each.held) for each in evaluated)
    for each in evaluated:
        key = each.suite, each.held
        assert sorted(rows[key]) == sorted([*range(HELD_OUT)] * held[key])
        if held[key] == 1:
            assert each.reward == (fmean(rewards[key]) if rewards[key] else None)
