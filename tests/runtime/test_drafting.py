"""Whole runs that draft: the same tokens, whatever becomes of the history process."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from rhymeflow.histospec.index import Index
from rhymeflow.observe import metrics
from rhymeflow.runtime import train as entry
from rhymeflow.runtime.controller import Controller
from rhymeflow.workers.messages import LearnerReady
from tests.runtime.logs import reader, train
from tests.runtime.tiny import save_prompts, tiny_config

pytestmark = pytest.mark.slow

STEPS = 6
SHARED = Path("/dev/shm")


def config_for(directory: Path, eval_steps=0, **drafting):
    """Two epochs of six prompts. Synchronous, so that two runs train on the same in turn."""
    config = tiny_config(
        directory,
        rollout={"max_completion_length": 40},
        learner={"max_steps": STEPS, "learning_rate": 1e-3},
        schedule={"name": "synchronous", "max_staleness": None},
        run={"eval_steps": eval_steps, "eval_temperature": 1.0},
        drafting=drafting,
    )
    save_prompts(directory / "prompts.jsonl", count=6)
    return config


def texts(config) -> dict[tuple[int, int], list[int]]:
    """Every response by group and member, whatever it was cut into."""
    log = reader(config)
    found: dict[tuple[int, int], list[int]] = {}
    for group, member, tokens in log.query(
        "SELECT group_id, member, tokens FROM segments ORDER BY group_id, member, start"
    ):
        found.setdefault((group, member), []).extend(memoryview(tokens).cast("i"))
    log.close()
    return found


def answers(config) -> dict[tuple[int, int], list[int]]:
    """Every answer to a held-out prompt, by version and row."""
    log = reader(config)
    rows = log.query("SELECT group_id, version, row FROM evaluations")
    log.close()
    found = texts(config)
    return {(version, row): found[group, 0] for group, version, row in rows}


def num_stored(config) -> int:
    return len(texts(config))


def figures(config, where: str = "TRUE") -> tuple[int, int, int]:
    """Tokens, the iterations that generated them, and drafted tokens."""
    log = reader(config)
    (found,) = log.query(
        "SELECT SUM(LENGTH(tokens) / 4), SUM(steps), SUM(drafted)"
        f" FROM segments JOIN groups USING (group_id) WHERE suite IS NULL AND {where}"
    )
    log.close()
    return found


def wait_for(condition) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ours() -> list[str]:
    return [path.name for path in SHARED.glob(f"r*f*-{os.getpid()}-*")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The run without drafts."""
    config = config_for(tmp_path_factory.mktemp("plain"), window="off")
    train(config)
    assert figures(config)[2] == 0
    assert not any(
        name.startswith("draft/") for name in metrics.read(Path(config.run.output_dir))[2]
    )
    return texts(config)


@pytest.fixture(scope="module")
def drafted(tmp_path_factory):
    config = config_for(tmp_path_factory.mktemp("drafted"), window="aimd")
    return config, train(config)


@pytest.fixture
def told(monkeypatch):
    """What the index holds once all of the run is written, for which the end is held up."""
    told = {}
    made = entry.history_index

    @contextmanager
    def waited_for(config, run_dir):
        with made(config, run_dir) as index:
            yield index
            if index is not None:
                stored = num_stored(told["config"])
                wait_for(lambda: index.num_responses >= stored)
                told["responses"], told["stored"] = index.num_responses, stored

    monkeypatch.setattr(entry, "history_index", waited_for)
    return told


def test_drafts_change_no_token(plain, drafted):
    config, _ = drafted
    assert texts(config) == plain
    tokens, steps, proposed = figures(config)
    assert proposed > 0
    assert tokens > steps, "nothing was accepted"


def test_trees_change_no_token_either(plain, tmp_path):
    config = config_for(tmp_path, window="aimd", shape="tree")
    train(config)
    assert texts(config) == plain
    tokens, steps, proposed = figures(config)
    assert proposed > tokens - steps > 0


def test_the_figures_are_where_they_are_looked_for(drafted):
    config, summary = drafted
    tokens, steps, proposed = figures(config)
    rows = metrics.read(Path(config.run.output_dir))
    for name in ("mean_acceptance_length", "acceptance_rate", "time_saved", "history_tokens"):
        assert f"draft/{name}" in rows[STEPS], name
    assert summary.drafts.mean_acceptance_length == pytest.approx(tokens / steps)
    assert summary.drafts.acceptance_rate == pytest.approx((tokens - steps) / proposed)
    log = reader(config)
    ((counted,),) = log.query("SELECT SUM(steps <= LENGTH(tokens) / 4 AND steps > 0) FROM segments")
    assert [(counted,)] == log.query("SELECT COUNT(*) FROM segments")
    log.close()


def test_history_that_is_killed_costs_no_token(plain, tmp_path, monkeypatch, told):
    told["config"] = config = config_for(tmp_path, window="aimd")
    tick, struck = Controller._tick, []

    def tick_and_strike(self):
        if not struck and self.training.published >= 2:
            worker = self.supervisor.history
            while not self.history._is_ready:
                self._receive(self.supervisor.wait(0.1))
            struck.append(worker.pid)
            os.kill(worker.pid, signal.SIGKILL)
        tick(self)

    monkeypatch.setattr(Controller, "_tick", tick_and_strike)
    console = Console(file=io.StringIO())
    assert train(config, console).steps == STEPS
    (pid,) = struck
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    (warning,) = [s for s in console.file.getvalue().splitlines() if s.startswith("warning")]
    assert "history died (killed by SIGKILL)" in warning
    assert texts(config) == plain
    assert told["responses"] == told["stored"] >= len(plain), "its successor knows all of it"
    assert ours() == []


def test_held_out_answers_are_drafted_and_the_same(tmp_path, told):
    plain = config_for(tmp_path / "plain", eval_steps=1, window="off")
    train(plain)
    told["config"] = config = config_for(tmp_path / "drafted", eval_steps=1, window="aimd")
    train(config)
    assert answers(config) == answers(plain)
    assert len(answers(config)) == (STEPS + 1) * config.data.eval_size
    assert told["responses"] == told["stored"], "the next evaluation finds them"


def test_a_run_begins_with_the_history_of_another(drafted, tmp_path, monkeypatch):
    """The same seed, weights and prompts: what the first run said first is said again."""
    earlier, _ = drafted
    history = earlier.run.output_dir
    config = config_for(tmp_path, window="aimd", history_run=history)
    hear = Controller._from_learner

    def wait_and_hear(self, message):
        if isinstance(message, LearnerReady):  # nothing is produced before this
            index = Index.attach(self.history._index.handle)
            wait_for(lambda: index.num_responses == num_stored(earlier))
        hear(self, message)

    monkeypatch.setattr(Controller, "_from_learner", wait_and_hear)
    train(config)
    assert texts(config) == texts(earlier)
    tokens, steps, _ = figures(config, "version = 0")
    assert tokens > 2 * steps, "before there was an epoch of its own"
    assert tokens / steps > 1.5 * (lambda t, s, _: t / s)(*figures(earlier, "version = 0"))


def owner(name: str) -> int | None:
    """The process that made a piece of shared memory, if it is one of ours."""
    found = re.fullmatch(r"(?:rhymeflow|rf-).*-(\d+)-\w+", name)
    return int(found[1]) if found else None


def family(pid: int) -> set[int]:
    """A process and its descendants: workers are children of the server that forks them."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {pid}.union(*(family(int(child)) for child in children))


def test_no_memory_is_left_when_the_controller_is_killed(tmp_path):
    config = tiny_config(tmp_path, learner={"max_steps": 10_000}, drafting={"window": "cost"})
    config_file = tmp_path / "config.yaml"
    config_file.write_text(json.dumps(config.model_dump(mode="json")))
    process = subprocess.Popen(
        [sys.executable, "-m", "rhymeflow", "train", str(config_file)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: max(metrics.read(tmp_path / "run"), default=0) >= 1)
        names = [path.name for path in SHARED.iterdir() if owner(path.name) in family(process.pid)]
    finally:
        process.kill()
        process.wait()
    assert len(names) == 2, "weights and history"
    wait_for(lambda: not any((SHARED / name).exists() for name in names))
