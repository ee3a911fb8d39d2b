"""Runs that are killed anywhere and resumed: nothing is lost, and nothing is done twice."""

import io
import json
import os
import shutil
import signal
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file

from rhymeflow.config.fields import brief
from rhymeflow.config.load import read_config
from rhymeflow.errors import UserError
from rhymeflow.observe import metrics
from rhymeflow.runtime import train as runtime
from rhymeflow.runtime.resume_options import (
    changed_code,
    changes,
    check_change,
    whole_paths,
    with_options,
    with_values,
)
from rhymeflow.trainer.inputs import Inputs
from rhymeflow.utils import shared_memory
from rhymeflow.utils.child import descendants
from rhymeflow.utils.code_digest import DIGESTS
from tests.processes import Command
from tests.refused import refusal
from tests.runtime import even
from tests.runtime.logs import audit, each_turn, train
from tests.runtime.tiny import file_of, published, tiny_config, until

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
    nothing more is written, committed or said."""

    def die(controller):
        if dies(controller):
            monkeypatch.setattr(controller.store, "record", lambda *args: 0)
            monkeypatch.setattr(controller.store, "commit", lambda **how: None)
            raise Killed

    with each_turn(die), pytest.raises(Killed):
        train(config)


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


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("model.dtype", "bfloat16", "checkpoints"),
        ("data.shuffle", "false", "their order continues"),
        ("rollout.num_generations", "4", "groups in flight have this size"),
        ("learner.max_steps", "3", "has reached step 6"),
        ("learner.max_stepps", "9", "did you mean"),
        ("schedule.extra_groups", "1", "admitted and routed under it"),
    ],
)
def test_what_cannot_be_changed_is_said_with_its_reason(straight, name, value, said):
    with pytest.raises(UserError, match=said):
        resume(straight, **{name.replace(".", "__"): value})


def test_what_is_changed_is_said_with_the_step_that_it_holds_from(tmp_path, straight):
    run_dir, mine = tmp_path / "run", tmp_path / "mine.py"
    shutil.copytree(straight, run_dir)
    mine.write_text(Path(even.__file__).read_text())
    with closing(runtime.SqliteTrajectoryStore(run_dir / "events.db")) as store:
        store.put_digests(store.digests() | {f"code {mine}": "of other code"})
        store.commit()
    functions = [{"function": f"{mine}:even_digits", "weight": 2.0}]
    changed = {"learner.max_steps": "7", "reward.functions": json.dumps(functions)}
    console = Console(file=io.StringIO(), width=300)
    runtime.resume(run_dir, partial(with_options, overrides=changed), console=console)
    said = console.file.getvalue()
    function = f'reward.functions.0.function = "{brief(f"{mine}:even_digits")[1:]}, before "'
    assert f"from step 7 on: {function}" in said
    assert "reward.functions.0.weight = 2.0, before 1.0; learner.max_steps = 7, before 6\n" in said
    assert f"from step 7 on: {mine} has changed since the run was started last\n" in said


def test_what_cannot_be_changed_is_named_by_its_own_field():
    before = read_config("demo", {"model.lora.rank": "8"})
    said = refusal(check_change, before, read_config("demo", {"model.lora.rank": "4"}), 0)
    assert said.startswith("model.lora.rank: cannot be changed from 8 to 4 when a run is resumed")


def test_files_with_code_are_compared(tmp_path):
    mine = tmp_path / "mine.py"
    config = read_config("demo", {"learner.advantage": f"{mine}:f", "reward.functions": "regex"})
    digests: dict[str, str] = {}
    mine.write_text("def f(rewards, lengths): return rewards")
    assert changed_code(config, digests) == changed_code(config, digests) == []
    mine.write_text("def f(rewards, lengths): return -rewards")
    (said,) = changed_code(config, digests)
    assert said.startswith(f"{mine} has changed")
    assert changed_code(config, digests) == [], "since the last start"


def test_code_of_modules_and_of_no_file_is_compared(tmp_path, monkeypatch):
    (tmp_path / "somewhere.py").write_text("def f(view): return None")
    monkeypatch.syspath_prepend(tmp_path)
    digests: dict[str, str] = {}

    def begun(reward: object) -> list[str]:
        inputs = Inputs(tmp_path / "run")
        fields = {"function": inputs.name(reward, "it")}
        inputs.write(begun=bool(digests))
        given = {"schedule.sync": "somewhere.f", "reward.functions": json.dumps([fields])}
        return changed_code(read_config("demo", given), digests)

    assert begun(lambda completions: 1) == begun(lambda completions: 1) == []
    (tmp_path / "somewhere.py").write_text("def f(view): return 1")
    assert begun(lambda completions: 2) == [
        "lambda in objects.pickle has changed since the run was started last",
        f"{tmp_path / 'somewhere.py'} has changed since the run was started last",
    ]
    (tmp_path / "run" / "inputs" / DIGESTS).write_text("{")
    spec = f"{tmp_path}/run/inputs/objects.pickle:lambda"
    broken = read_config("demo", {"reward.functions": json.dumps([{"function": spec}])})
    with pytest.raises(UserError, match=r"objects\.json: has no digest of 'lambda': JSONDecodeE"):
        changed_code(broken, digests)


def test_a_trainer_can_turn_off_what_its_run_had_and_name_files_as_before(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    given = {"learner.max_grad_norm": "0.5", "drafting.history_run": "old", "run.keep_tokens": "9"}
    given |= {"data.chat_template": "x.jinja", "run.checkpoint_dir": "there"}
    config = read_config("demo", given)
    before = runtime.in_force(config, tmp_path / "run")
    again = whole_paths(with_values(before, config))
    check_change(before, again, 6)
    assert changes(before, again, 6) == ()
    off = read_config("demo", {**given, "learner.max_grad_norm": "null", "run.keep_tokens": "null"})
    (said,) = changes(before, whole_paths(with_values(before, off)), 6)
    assert "learner.max_grad_norm = null, before 0.5" in said
    assert "run.keep_tokens = null, before 9" in said
    assert said.count("before") == 2
    drafts = read_config("demo", {"drafting.window": "off"})
    assert with_values(before, drafts).drafting.history_run is None
    vllm = read_config("demo", {"rollout.engine": "vllm", "rollout.vllm_kv_cache_gb": "3"})
    assert not [*with_values(vllm, config).effectless]


def test_a_run_directory_in_use_is_refused(straight):
    store = runtime.SqliteTrajectoryStore(straight / "events.db")
    try:
        with pytest.raises(UserError, match=f"process {os.getpid()}"):
            resume(straight)
    finally:
        store.close()


def test_data_that_changed_is_named(straight):
    source = straight.parent / "prompts.jsonl"
    text = source.read_text()
    source.write_text("\n".join(reversed(text.splitlines())) + "\n")
    try:
        with pytest.raises(UserError, match="has other content in its 10 rows"):
            resume(straight, learner__max_steps="7")
    finally:
        source.write_text(text)


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
        said = ": cannot be read" if damage is cut_short else ": the checksum of its weights"
        assert f"step-{version}{said}" in out.getvalue()
    with closing(sqlite3.connect(run_dir / "events.db")) as log:
        query = """SELECT COUNT(*), COUNT(DISTINCT json_extract(body, '$.checksum')) FROM events
            WHERE kind IN ('VersionPublished', 'LearnerReady')
            AND json_extract(body, '$.version') = 6"""
        assert log.execute(query).fetchone() == (2, 1), "made again, to the last bit"
    audit(run_dir)


@pytest.mark.slow
def test_the_command_resumes_a_killed_run_and_ctrl_c_ends_the_step_and_saves(tmp_path):
    run_dir = tmp_path / "run"
    config = small(tmp_path, learner={"max_steps": 10_000})
    process = Command("train", file_of(config, tmp_path), cwd=tmp_path)
    until(lambda: published(run_dir) >= 3)
    prefix = shared_memory.prefix_for(run_dir, "")
    for pid in (process.pid, *descendants(process.pid)):
        os.kill(pid, signal.SIGKILL)  # whoever would take away what the others leave, too
    process.wait()
    left = list(shared_memory.DIRECTORY.glob(f"{prefix}*"))
    assert left or not shared_memory.DIRECTORY.is_dir()
    reached = published(run_dir)
    again = Command("train", "config.yaml", cwd=tmp_path)
    assert again.wait() == 2
    assert "rhymeflow resume" in again.output
    process = Command("resume", "run", cwd=tmp_path)
    until(lambda: published(run_dir) >= reached + 2)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130, process.output
    assert "stopped" in process.output
    checkpoint = f"checkpoints/step-{json.loads((run_dir / 'summary.json').read_text())['steps']}"
    assert (run_dir / checkpoint).is_dir()
    assert checkpoint in process.output
    assert not list(shared_memory.DIRECTORY.glob(f"{prefix}*"))
    audit(run_dir)
