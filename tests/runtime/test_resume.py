"""Runs that are killed anywhere and resumed: nothing is lost, and nothing is done twice."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file

from rhymeflow import Trainer
from rhymeflow.core.commands import Train
from rhymeflow.core.events import LearnerReady, VersionPublished
from rhymeflow.errors import UserError
from rhymeflow.observe import metrics
from rhymeflow.runtime import train as runtime
from rhymeflow.runtime.controller import Controller
from rhymeflow.runtime.resume_options import with_options
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.utils import shared_memory
from rhymeflow.utils.child import descendants
from tests.runtime.logs import audit, check_replay, each_turn, reader, train
from tests.runtime.tiny import program, published, tiny_config, until

ROOT = Path(__file__).parents[2]
STEPS = 6


def resume(run_dir: Path, **overrides: str):
    options = {name.replace("__", "."): value for name, value in overrides.items()}
    return runtime.resume(
        run_dir, lambda config: with_options(config, options), console=Console(file=io.StringIO())
    )


def small(directory: Path, name: str = "run", **sections):
    return tiny_config(
        directory,
        learner={"max_steps": STEPS, **sections.pop("learner", {})},
        run={
            "eval_steps": 2,
            "save_steps": 2,
            "output_dir": str(directory / name),
            **sections.pop("run", {}),
        },
        **sections,
    )


BY_DIFFERENCES = {
    "weights": {"transport": "delta"},
    "learner": {"learning_rate": 1e-10},  # so small that few weights of a float32 model change
}
SYNCHRONOUS = {"schedule": {"name": "synchronous", "max_staleness": None}}


class Killed(Exception):  # noqa: N818
    """Stands for the death of the controller's process."""


def train_until(monkeypatch, config, dies) -> None:
    """Train until `dies(controller)`; then everything ends as if the process had been killed:
    nothing more is written, committed or said.
    """

    def die(controller):
        if dies(controller):
            monkeypatch.setattr(controller.store, "record", lambda *args: 0)
            monkeypatch.setattr(controller.store, "commit", lambda **how: None)
            raise Killed

    with each_turn(die), pytest.raises(Killed):
        train(config)


def tokens(run_dir: Path) -> dict:
    """By group and member of what is trained on: all tokens, in order."""
    log = TrajectoryReader(run_dir / "events.db")
    found: dict = {}
    for group, member, blob in log.query(
        "SELECT group_id, member, tokens FROM segments WHERE group_id >= 0 ORDER BY 1, 2, start"
    ):
        found[group, member] = found.get((group, member), b"") + blob
    log.close()
    return found


def learned(run_dir: Path) -> dict:
    names = ("loss", "grad_norm", "reward", "entropy", "eval/reward", "num_tokens")
    return {
        step: {name: row[name] for name in names if name in row}
        for step, row in metrics.read(run_dir).items()
    }


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The run directory of a synchronous run that nothing happened to."""
    directory = tmp_path_factory.mktemp("straight")
    train(small(directory, **SYNCHRONOUS))
    return directory / "run"


def at(version: int, *, is_training: bool):
    def is_there(controller: Controller) -> bool:
        training = controller.training
        return training.published == version and (training.batch is not None) == is_training

    return is_there


AT = {
    "while a batch is trained on": at(3, is_training=True),
    "in the last evaluation": at(STEPS, is_training=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("when", AT)
def test_a_synchronous_run_is_the_same_to_the_last_bit(tmp_path, monkeypatch, straight, when):
    config = small(tmp_path, **SYNCHRONOUS)
    train_until(monkeypatch, config, AT[when])
    summary = Trainer(config=config).train(resume_from_checkpoint=True)
    assert summary.steps == STEPS
    assert tokens(tmp_path / "run") == tokens(straight)
    assert learned(tmp_path / "run") == learned(straight)
    check_replay(config)
    audit(tmp_path / "run")
    log = reader(config)
    assert [attempt.number for attempt in log.attempts()] == [1, 2]
    log.close()


@pytest.mark.slow
def test_an_asynchronous_run_that_is_killed_twice_loses_nothing(tmp_path, monkeypatch):
    """Batches are begun early, weights pulled by differences; a learner restores what it had."""
    config = small(
        tmp_path,
        schedule={"name": "rhymeflow", "max_staleness": 2},
        rollout={"num_instances": 2, "max_completion_length": 40, "max_num_seqs": 1},
        learner={"groups_per_batch": 4, **BY_DIFFERENCES["learner"]},
        weights=BY_DIFFERENCES["weights"],
        run={"save_steps": 0, "save_seconds": 0},
    )
    train_until(monkeypatch, config, lambda c: c.training.published == 2)
    before = tokens(tmp_path / "run")
    assert before

    def die(controller):
        if controller.training.published == 4:
            raise Killed

    with each_turn(die), pytest.raises(Killed):
        resume(tmp_path / "run")
    assert resume(tmp_path / "run").steps == STEPS
    after = tokens(tmp_path / "run")
    assert all(after[key].startswith(made) for key, made in before.items()), "tokens were lost"
    check_replay(config)
    audit(tmp_path / "run")
    with closing(reader(config)) as log:
        names = [name for (name,) in log.query("SELECT DISTINCT instance FROM segments")]
        said = [
            e.event for e in log.events() if isinstance(e.event, VersionPublished | LearnerReady)
        ]
        commands = [each.command for each in log.commands()]
    assert any("." in name for name in names), "a name was used again"
    for version in (2, 4):
        assert len({e.checksum for e in said if e.version == version}) == 1, "restored otherwise"
    assert sum(bool(c.parts) for c in commands if isinstance(c, Train)) >= 3
    rows = [row for row in metrics.read(tmp_path / "run").values() if "reward" in row]
    shares = [row["params/changed_share"] for row in rows]
    assert all(0 < share < 0.1 for share in shares), shares


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("model.dtype", "bfloat16", "checkpoints"),
        ("data.shuffle", "false", "their order goes on"),
        ("rollout.num_generations", "4", "groups in flight have this size"),
        ("learner.max_steps", "3", "has reached step 6"),
        ("learner.max_stepps", "9", "did you mean"),
        ("schedule.extra_groups", "1", "admitted and routed under it"),
    ],
)
def test_what_cannot_be_changed_is_said_with_its_reason(straight, name, value, said):
    with pytest.raises(UserError, match=said):
        resume(straight, **{name.replace(".", "__"): value})


def test_a_run_directory_in_use_is_refused(straight):
    store = runtime.SqliteTrajectoryStore(straight / "events.db")
    try:
        with pytest.raises(UserError, match=f"process {os.getpid()}"):
            resume(straight)
    finally:
        store.close()


def test_data_that_changed_is_named(tmp_path, monkeypatch):
    config = small(tmp_path, **SYNCHRONOUS)
    train_until(monkeypatch, config, AT["while a batch is trained on"])
    rows = (tmp_path / "prompts.jsonl").read_text().splitlines()
    (tmp_path / "prompts.jsonl").write_text("\n".join(reversed(rows)) + "\n")
    with pytest.raises(UserError, match="has other content in its 10 rows"):
        resume(tmp_path / "run")


def cut_short(checkpoint: Path) -> None:
    (path,) = (checkpoint / "learner").glob("*.distcp")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def changed(checkpoint: Path) -> None:
    (path,) = (checkpoint / "learner").glob("*.distcp")
    weights = next(iter(load_file(checkpoint / "model.safetensors").values()))
    place = path.read_bytes().index(weights.numpy().tobytes())
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"\x00\x00\x80\x3f")


@pytest.mark.slow
@pytest.mark.parametrize("damages", [{6: changed}, {4: cut_short, 6: cut_short}])
def test_a_damaged_checkpoint_is_passed_over_and_said(tmp_path, straight, damages):
    run_dir = tmp_path / "run"
    shutil.copytree(straight, run_dir)
    for version, damage in damages.items():
        damage(run_dir / "checkpoints" / f"step-{version}")
    out = io.StringIO()
    change = partial(with_options, overrides={"learner.max_steps": "7"})
    console = Console(file=out, width=300)
    assert runtime.resume(run_dir, change, console=console).steps == 7
    there = {each.name for each in (run_dir / "checkpoints").iterdir()}
    for version, damage in damages.items():
        assert f"damaged-step-{version}" in there
        said = ": cannot be read" if damage is cut_short else ": its weights have not"
        assert f"step-{version}{said}" in out.getvalue()
    with closing(sqlite3.connect(run_dir / "events.db")) as log:
        query = """SELECT COUNT(*), COUNT(DISTINCT json_extract(body, '$.checksum')) FROM events
            WHERE kind IN ('VersionPublished', 'LearnerReady')
            AND json_extract(body, '$.version') = 6"""
        assert log.execute(query).fetchone() == (2, 1), "made again, to the last bit"
    audit(run_dir)


@pytest.mark.slow
def test_the_command_resumes_a_run_that_was_killed_from_outside(tmp_path):
    config = small(tmp_path, learner={"max_steps": 12})
    command = [sys.executable, "-m", "rhymeflow"]
    process = program(config, tmp_path, cwd=tmp_path)
    until(lambda: published(tmp_path / "run") >= 3)
    prefix = shared_memory.prefix_for(tmp_path / "run", "")
    for pid in (process.pid, *descendants(process.pid)):
        os.kill(pid, signal.SIGKILL)  # whoever would take away what the others leave, too
    process.wait()
    left = list(shared_memory.DIRECTORY.glob(f"{prefix}*"))
    assert left or not shared_memory.DIRECTORY.is_dir()
    again = subprocess.run([*command, "train", "config.yaml"], cwd=tmp_path, capture_output=True)
    assert b"rhymeflow resume" in again.stderr
    done = subprocess.run(
        [*command, "resume", "run"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 12
    assert not list(shared_memory.DIRECTORY.glob(f"{prefix}*"))
    audit(tmp_path / "run")
