"""What a run leaves behind, read by somebody who has only its files: SQL, the audit, the replay."""

import gzip
import json
import re
import shutil
import sqlite3
import struct
from contextlib import closing
from dataclasses import fields
from pathlib import Path

import pytest

from rhymeflow import build
from rhymeflow.config.load import read_config
from rhymeflow.learner.token_details import CLIPPED, MASKED
from rhymeflow.observe import metrics
from rhymeflow.observe.audit import LogAudit, audit_run
from rhymeflow.observe.meanings import meaning_of
from rhymeflow.store import codec
from rhymeflow.store.reader import TrajectoryReader
from tests.runtime.logs import audited, train
from tests.runtime.tiny import tiny_config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "run-directory.md").read_text(encoding="utf-8")
QUERIES = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A run with surplus groups, pulls, masked and clipped tokens."""
    config = tiny_config(
        tmp_path_factory.mktemp("run"),
        rollout={"num_instances": 2, "max_num_seqs": 5},
        learner={
            "off_policy_correction": "none",
            "epsilon": 1e-4,
            "epsilon_high": None,
            "mask_truncated_completions": True,
        },
        schedule={"extra_groups": 1, "max_staleness": None},
        run={"token_details": True, "profile_steps": (2,)},
    )
    train(config)
    return config


@pytest.fixture(scope="module")
def run_dir(config):
    return Path(config.run.output_dir)


@pytest.fixture
def db(run_dir):
    connection = sqlite3.connect(f"file:{run_dir}/events.db?mode=ro", uri=True)
    yield connection
    connection.close()


# -- the page -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(len(QUERIES)))
def test_the_queries_of_the_page_find_something(db, number):
    assert db.execute(QUERIES[number]).fetchall(), QUERIES[number]


def test_the_page_has_every_table_view_and_column(db):
    names = [n for (n,) in db.execute("SELECT name FROM sqlite_master WHERE type != 'index'")]
    described = {}
    for head, rows in re.findall(r"^\| `(\w+)` \|.*\n\| --- .*\n((?:\|.*\n)+)", PAGE, re.MULTILINE):
        cells = [row.split("|")[1] for row in rows.splitlines()]
        described[head] = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    stored = {n: {c[1] for c in db.execute(f"PRAGMA table_info({n})")} for n in names}
    assert described == stored


def test_the_page_has_every_file(run_dir):
    named = set(re.findall(r"`([\w.-]+)/?(?:step-N/|attempt-N/)?`", PAGE.split("\n\n")[2]))
    assert {path.name for path in run_dir.iterdir()} <= named


def test_the_page_has_every_event_and_command_with_its_fields(db):
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (.*)\|$", PAGE, re.MULTILINE)
    described = {name: re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", cell)) for name, cell in rows}
    for name, kind in {**codec.KINDS, **codec.COMMANDS}.items():
        assert described.get(name) == [field.name for field in fields(kind)], name


# -- the file -------------------------------------------------------------------------------------


def test_the_configuration_says_the_values_in_force(config, run_dir, db):
    found = read_config(str(run_dir / "config.yaml"))
    ((text,),) = db.execute("SELECT config FROM attempts")
    assert json.loads(text) == found.model_dump(mode="json")
    values = found.model_dump(exclude={"simulation", "sft"})
    nulls = {
        f"{section}.{name}"
        for section, fields in values.items()
        if isinstance(fields, dict)
        for name, value in fields.items()
        if value is None
    }
    assert nulls == {
        "model.gguf_file", "model.tokenizer", "model.quantization",
        "data.eval_source", "data.system_prompt", "data.assistant_prefix",
        "data.max_prompt_length", "rollout.cpus", "rollout.python", "learner.cpus",
        "rollout.vllm_max_model_length", "drafting.history_run", "run.keep_tokens", "run.backup",
        "run.checkpoint_dir", "run.project", "run.entity", "run.run_group", "ray.address",
        "rollout.vllm_gpu_memory_utilization", "rollout.vllm_model_runner",
        "rollout.vllm_head_dtype", "cluster.nodes", "rollout.max_instances",
        "emulation.profile", "emulation.devices", "emulation.train_devices",
        "emulation.reward_seconds", "emulation.environment_seconds",
        "learner.reward_clip", "learner.advantage_clip", "learner.dual_clip", "learner.delta",
        "learner.importance_sampling_floor", "learner.off_policy_mask_threshold",
        "environment.agent", "environment.agent_python",
    }, "each of them means none, no limit, or what suits the device"  # fmt: skip
    assert (found.schedule.max_staleness, found.schedule.routing) == (1, "waterfall")
    assert (found.data.size, found.data.eval_size, found.data.chat_template) == (10, 2, False)
    assert (found.model.device, found.model.dtype) == ("cpu", "float32")
    assert found.rollout.max_kv_tokens == 5 * 128, "as the engine has it"
    assert found.learner.epsilon_high == 1e-4
    assert build.plan(found) == build.plan(config)


def test_every_metric_of_a_run_has_a_meaning(run_dir):
    names = {name for row in metrics.read(run_dir).values() for name in row}
    assert len(names) > 40
    assert [name for name in names if meaning_of(name) is None] == []


# -- traces ---------------------------------------------------------------------------------------


def test_the_learner_and_the_first_instance_left_a_trace(run_dir):
    """Of step 2; the instance may have gone from version 0 to a later one than 1."""
    learner, instance = sorted((run_dir / "profile").iterdir())
    assert learner.name == "learner-step-2.json.gz"
    assert re.fullmatch(r"rollout-0-step-[2-8]\.json\.gz", instance.name)
    trained, generated = names_in(learner), names_in(instance)
    assert {"aten::mm", "SumBackward0", "Optimizer.step#AdamW.step"} <= trained
    assert "aten::bitwise_and" in generated, "of the noise"
    assert not any("Backward" in name for name in generated)


def names_in(trace: Path) -> set[str]:
    with gzip.open(trace) as file:
        return {event.get("name", "") for event in json.load(file)["traceEvents"]}


# -- the audit ------------------------------------------------------------------------------------


def test_the_audit_is_short_and_finds_nothing_wrong(run_dir):
    text = (ROOT / "examples" / "audit_run.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 117
    code, printed = audited(run_dir)
    assert code == 0, printed
    assert "law 1: 24 trajectories trained on, bound 1" in printed
    assert "'consumed': 8" in printed
    assert printed.splitlines()[-1] == "all hold"
    counted = counts(run_dir)
    assert counted.is_clean, counted.line
    assert f"{counted.proved} pulls proved" in printed
    assert counted.line.endswith(f"0 twice, all {counted.proved} pulls proved, 0 errors as rewards")


def counts(run_dir: Path) -> LogAudit:
    """What the last line of a run says."""
    with closing(TrajectoryReader(run_dir / "events.db")) as reader:
        return audit_run(reader)


def changed(table: str, kind: str, field: str, value: str, which: str = "TRUE") -> str:
    """A statement that changes a field of these events or commands."""
    return (
        f"UPDATE {table} SET body = json_set(body, '$.{field}', {value})"
        f" WHERE kind = '{kind}' AND {which};"
    )


OTHER = "'0123456789abcdef'"
SECOND = "json_extract(body, '$.version') = 1"
FIRST_CONSUMED = "(SELECT json_extract(body, '$.groups[0]') FROM commands WHERE kind = 'Train')"
THE_GROUP = f"group_id = {FIRST_CONSUMED}"
TAMPERED = {
    "a batch's version": (1, changed("commands", "Train", "version", "3", SECOND)),
    "the tokens' versions": (1, "UPDATE segments SET version = version + 4"),
    "old tokens' version": (1, "UPDATE segments SET version = 0 WHERE version > 1"),
    "V_traj": (1, changed("commands", "Route", "version", "9")),
    "the routes": (1, "DELETE FROM commands WHERE kind = 'Route'"),
    "the bound": (
        1,
        "UPDATE attempts SET config = json_set(config, '$.schedule.max_staleness', 0)",
    ),
    "a trajectory's tokens": (1, f"DELETE FROM segments WHERE {THE_GROUP}"),
    "a group's ending": (2, f"UPDATE groups SET ending = NULL WHERE {THE_GROUP}"),
    "how a group ended": (2, f"UPDATE groups SET ending = 'aborted' WHERE {THE_GROUP}"),
    "a group": (2, f"DELETE FROM groups WHERE {THE_GROUP}"),
    "a group's ending everywhere": (
        2,
        "DELETE FROM commands WHERE kind = 'Drop';"
        "UPDATE groups SET ending = NULL WHERE ending = 'aborted'",
    ),
    "a group consumed twice": (
        2,
        changed("commands", "Train", "groups[0]", FIRST_CONSUMED, SECOND),
    ),
    "what was trained on": (2, f"UPDATE trajectories SET trained = NULL WHERE {THE_GROUP}"),
    "when it was trained on": (2, "UPDATE trajectories SET trained = 1 WHERE trained = 0"),
    "a published checksum": (5, changed("events", "VersionPublished", "checksum", OTHER, SECOND)),
    "a pulled checksum": (5, changed("events", "Pulled", "checksum", OTHER, SECOND)),
    "a checksum left out": (5, changed("events", "LearnerReady", "checksum", "''")),
    "an instance's beginning": (5, "DELETE FROM events WHERE kind = 'InstanceJoined'"),
    "a publication": (5, f"DELETE FROM events WHERE kind = 'VersionPublished' AND {SECOND}"),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_the_audit_finds_what_was_tampered_with(run_dir, tmp_path, what):
    law, statements = TAMPERED[what]
    shutil.copy(run_dir / "events.db", tmp_path)
    connection = sqlite3.connect(tmp_path / "events.db")
    before = connection.total_changes
    connection.executescript(statements)
    assert connection.total_changes > before, "nothing was changed"
    connection.close()
    code, printed = audited(tmp_path)
    assert code == 1
    assert re.search(rf"^law {law}: (?!\d)", printed, re.MULTILINE), printed
    found = counts(tmp_path)
    assert {1: found.stale, 2: found.lost + found.twice, 5: found.unproved}[law] > 0, found


@pytest.mark.parametrize(
    "statement",
    [
        f"UPDATE trajectories SET reward = NULL WHERE {THE_GROUP}",
        "DELETE FROM events WHERE kind = 'TrajectoryRewarded'",
    ],
)
def test_a_response_trained_on_without_a_reward_is_counted(run_dir, tmp_path, statement):
    shutil.copy(run_dir / "events.db", tmp_path)
    with closing(sqlite3.connect(tmp_path / "events.db")) as connection:
        connection.executescript(statement)
    assert counts(tmp_path).errors > 0


# -- tokens ---------------------------------------------------------------------------------------


def test_token_details_are_there_for_each_token_trained_on(db):
    rows = db.execute(
        "SELECT length, reason, trained, d.logprobs, flags, s.logprobs, accepted"
        " FROM trajectories t JOIN token_details d USING (group_id, member)"
        " JOIN segments s USING (group_id, member) WHERE LENGTH(tokens) = 4 * length"
    ).fetchall()
    assert rows
    reasons = {reason for _, reason, *_ in rows}
    assert reasons == {"stop", "length"}, "the run has both kinds"
    clipped = 0
    for length, reason, batch, logprobs, flags, behaviour, accepted in rows:
        assert accepted == bytes(length), "nothing was drafted"
        if reason == "length":
            assert (logprobs, flags) == (None, bytes([MASKED]) * length)
            continue
        assert set(flags) <= {0, CLIPPED}
        clipped += sum(flags)
        learner = struct.unpack(f"<{length}f", logprobs)
        if batch == 0:
            sampled = struct.unpack(f"<{length}f", behaviour)
            assert learner == pytest.approx(sampled, abs=1e-4), "the policy that sampled"
    assert clipped > 0
    ((trained,),) = db.execute("SELECT COUNT(*) FROM trained")
    assert db.execute("SELECT COUNT(*) FROM token_details").fetchone() == (trained,)
