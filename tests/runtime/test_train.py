"""Real processes: what a run learns, what it logs, and how it ends when something goes wrong."""

import io
import json
import os
import signal
import subprocess
import time
from contextlib import closing
from types import SimpleNamespace

import pytest
from rich.console import Console

from rhymeflow.core.commands import Train
from rhymeflow.models.tokenizer import load_tokenizer
from rhymeflow.observe import metrics
from rhymeflow.runtime.controller import Controller
from rhymeflow.runtime.supervisor import WorkerDied
from rhymeflow.runtime.train import interruptible
from rhymeflow.utils.stopping import STOP_SIGNALS, as_interrupts
from tests.processes import is_running
from tests.runtime import even, plain
from tests.runtime.logs import reader, train
from tests.runtime.tiny import program, tiny_config, until

SYNCHRONOUS = {"name": "synchronous", "max_staleness": None}
TOLD = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


def batches(config) -> list[list[list[int]]]:
    """The responses of each batch, in the order they were trained on."""
    with closing(reader(config)) as log:
        trained = (each.command for each in log.commands() if isinstance(each.command, Train))
        batches = [log.batch(command.groups, command.members) for command in trained]
    return [[record.completion_ids for record in batch] for batch in batches]


def test_staleness_0_equals_the_plain_loop_loss_by_loss(tmp_path):
    """And leaves a complete run directory, a response on the screen, and a word on what rewards
    print."""
    reward = {"functions": [{"function": f"{even.__file__}:told_digits"}]}
    config = tiny_config(tmp_path, schedule=SYNCHRONOUS, learner={"max_steps": 5}, reward=reward)
    console = Console(file=io.StringIO(), width=120, height=40, force_terminal=True)
    summary, run_dir = train(config, console), tmp_path / "run"
    assert summary.staleness == {0: 30}
    rows = metrics.read(run_dir)
    expected = plain.train(config)
    assert len({step["reward"] for step in expected}) > 1, "nothing happens in this run"
    assert batches(config) == [step["made"] for step in expected]
    for version, step in enumerate(expected, start=1):
        for name in ("reward", "loss", "grad_norm"):
            assert rows[version][name] == pytest.approx(step[name], rel=1e-3, abs=1e-5), (
                version,
                name,
            )
        assert rows[version]["off_policy/mismatch_kl"] == pytest.approx(0.0, abs=1e-6)
    screen, log = console.file.getvalue(), run_dir / "logs" / "attempt-1" / "reward.log"
    where = f"(all of it is in {log})"
    assert screen.count(f"warning: reward functions print: judging \\x1b[31m {where}") == 1
    assert log.read_text().count("judging \x1b[31m\n") == 5 * 2 + 4 * 2, "of groups"
    first = expected[0]["made"][0]
    decoded = load_tokenizer(config.model).decode(first, skip_special_tokens=True)
    assert "response 0.0 of step 1: reward" in screen
    assert f"│ {decoded} " in screen
    names = {path.name for path in run_dir.iterdir()}
    assert names >= {"config.yaml", "events.db", "metrics.jsonl", "summary.json", "checkpoints"}
    written = json.loads((run_dir / "summary.json").read_text())
    assert written["steps"] == summary.steps == 5
    assert set(rows[5]) >= {
        *("reward", "step_time", "entropy", "completions/mean_length", "endings/consumed"),
        *("staleness/mean", "staleness/max", "off_policy/mismatch_kl", "idle/rollout"),
        *("idle/learner", "params/push_s", "params/pull_s", "coordination/coordinator_s"),
        *("coordination/store_s", "coordination/share", "coordination/cpu_share"),
        "lengths/explained_variance",
    }


# -- what goes wrong ------------------------------------------------------------------------------


def test_a_worker_that_is_killed_while_it_starts_is_named_and_everything_ends(
    tmp_path, monkeypatch
):
    seen, go_on = {}, Controller.run

    def kill_and_go_on(self):
        seen.update({w.name: w.pid for w in self.supervisor._runtime._workers.values()})
        os.kill(seen["learner"], signal.SIGKILL)
        return go_on(self)

    monkeypatch.setattr(Controller, "run", kill_and_go_on)
    config = tiny_config(tmp_path, run={"instance_restarts": 0})
    with pytest.raises(WorkerDied, match=r"learner died .*SIGKILL"):
        train(config)
    assert not any(map(is_running, seen.values()))


@pytest.mark.usefixtures("not_in_background")
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_what_stops_a_run_asks_it_to_end_and_then_ends_it(number):
    controller = SimpleNamespace(stop_asked=False, end_asked=False)
    before = signal.getsignal(number)
    with interruptible(controller), as_interrupts():
        signal.raise_signal(number)
        assert (controller.stop_asked, controller.end_asked) == (True, False)
        signal.raise_signal(number)
        assert controller.end_asked
    assert signal.getsignal(number) == before


@pytest.fixture
def not_in_background():
    """Shells start what is to run in the background with SIGINT ignored, `nohup` with SIGHUP."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("not_in_background")
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_what_stops_a_run_before_it_trains_is_as_ctrl_c(number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), as_interrupts():
        signal.raise_signal(number)
    assert signal.getsignal(number) == before


@pytest.mark.slow
@pytest.mark.usefixtures("not_in_background")
def test_a_run_that_is_stopped_while_it_loads_says_so_and_leaves_no_worker(tmp_path):
    process = program(tiny_config(tmp_path), tmp_path, **TOLD, start_new_session=True)
    until(lambda: list((tmp_path / "run").glob("logs/*/*.log")))
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)  # until nobody has its standard output
    assert output.endswith("rhymeflow: interrupted\n")
    assert process.returncode == 130
    assert (tmp_path / "run" / "summary.json").exists()
    assert time.monotonic() - started < 10.0
