"""Ctrl-C on the commands: one line, exit code 130, and nothing is left, running or half written."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import rhymeflow
from rhymeflow import cli
from tests.dashboard.conftest import Client
from tests.export.made import MadeRun, model
from tests.processes import Command, is_running
from tests.runtime.tiny import until as wait_until

PACKAGE = str(Path(rhymeflow.__file__).parent)


def interrupt_at(number):
    """Send this process Ctrl-C when the package's functions have been called so often."""
    left = number

    def count(frame, event, _):
        nonlocal left
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(count)


@pytest.fixture
def made(tmp_path):
    """A directory with a run `run` of 300 responses, in which the test works."""
    run = MadeRun(tmp_path / "run", model(tmp_path / "model"))
    for number in range(100):
        run.group(number)
        for member in range(3):
            run.response(number, member, "a<eos>", 0.5)
    run.close()
    return tmp_path


CASES = {
    "doctor": ((), (10, 60)),
    "train": (("qwen3_8b_16x8", "--dry-run=plan"), (300, 2000)),
    "render": (("recipe:tools", "tools"), (300, 5000)),
    "simulate": (("demo", "--output", "simulated"), (1000, 20_000)),
    "export": (("run", "--output", "rows.jsonl"), (20, 2000)),
    "generate": (("recipe:demo", "a3 b4?"), (300, 3000)),
    "sft": (("demo", "--sft.output_dir", "tuned"), (1000, 50_000)),
    "bench": (("chaos_fake", "--faults", "40"), (1000, 20_000)),
}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_ctrl_c_is_one_line_and_exit_130(name, place, made, monkeypatch, capsys):
    arguments, numbers = CASES[name]
    monkeypatch.chdir(made)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupt_at(numbers[place])
        code = cli.main([name, *arguments])
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGINT, before)
    assert (code, capsys.readouterr().err) == (130, "rhymeflow: interrupted\n")
    left = {each.name for each in made.iterdir()} - {"model", "run"}
    assert left <= {"simulated"}, "which can be looked at as far as it came"


def test_the_exit_code_is_130_where_python_would_end_by_the_signal(tmp_path):
    text = """if True:
        import sys
        from rhymeflow.cli import dispatch, main
        dispatch.recipes = lambda args: exec("raise KeyboardInterrupt")
        sys.exit(main(["recipes"]))
    """
    (tmp_path / "struck.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": f"{PACKAGE}/.."}
    done = subprocess.run(
        [sys.executable, "-m", "struck"], cwd=tmp_path, env=environment, capture_output=True
    )
    assert done.returncode == 130


def test_ctrl_c_while_the_command_is_still_imported():
    text = """if True:
        import sys
        class Struck:
            def find_spec(self, name, path, target=None):
                if name == "rhymeflow.errors":
                    raise KeyboardInterrupt
        sys.meta_path.insert(0, Struck())
        from rhymeflow.cli import main
        sys.exit(main(["doctor"]))
    """
    environment = {**os.environ, "PYTHONPATH": f"{PACKAGE}/.."}
    done = subprocess.run(
        [sys.executable, "-c", text], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (130, "rhymeflow: interrupted\n")


def test_a_dashboard_is_meant_to_end_by_ctrl_c(made, capsys):
    def stop_it_when_it_answers():
        while not (port := re.search(r"http://127\.0\.0\.1:(\d+)", capsys.readouterr().out)):
            time.sleep(0.02)
        answered.append(Client(int(port[1])).raw("/")[0])
        signal.raise_signal(signal.SIGINT)

    answered = []
    stopping = threading.Thread(target=stop_it_when_it_answers)
    stopping.start()
    code = cli.main(["dashboard", str(made / "run")])
    stopping.join()
    assert (answered, code, capsys.readouterr().err) == ([403], 0, "")


@pytest.mark.slow
def test_ctrl_c_ends_the_workers_of_an_evaluation(tmp_path):
    process = Command("eval", "recipe:demo", "--n", "64", cwd=tmp_path)
    wait_until(lambda: len(children(process.pid)) > 2)
    workers = children(process.pid)
    process.send_signal(signal.SIGINT)
    assert (process.wait(), process.output) == (130, "rhymeflow: interrupted\n")
    wait_until(lambda: not any(map(is_running, workers)))


def children(pid):
    """The processes that it has started, and theirs."""
    found = list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return found + [each for child in found for each in children(child)]
