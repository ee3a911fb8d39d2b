"""A task of one's own: the line that trains on it, and what is said when something is wrong."""

# ruff: noqa: E501 (the tables of mistakes read best with one a line)
import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rhymeflow import check, cli
from rhymeflow.config import help as pages
from rhymeflow.config.fields import field_paths
from rhymeflow.config.load import parse_config
from rhymeflow.core.events import VersionPublished
from rhymeflow.errors import UserError
from rhymeflow.runtime.start import claimed
from tests.runtime.tiny import save_model

ROWS = [{"prompt": f"{n:02}+{3 * n % 10}?", "answer": str(n)} for n in range(40)]

JUDGES = """
import helpers
def even(completions, answer, **columns):
    return [sum(c in "02468" for c in text) / max(len(text), 1) for text in completions]
def gold(completions, gold): ...
def optional(completions, gold=None): return [0.0 for _ in completions]
def two(completions, answer): return [1.0, 2.0]
LIMIT = 3
"""

SHORT = [
    *("--learner.max_steps=1", "--learner.groups_per_batch=2", "--rollout.num_generations=2"),
    *("--rollout.max_completion_length=12", "--drafting.window=off"),
]
Mistake = Callable[[list[str]], str]
ONE_LINE = ["train", "--model", "model", "--data", "sums.csv", "--reward", "judges.py:even"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder as a newcomer has it: a model, a CSV file, a file with reward functions."""
    folder = tmp_path_factory.mktemp("made")
    save_model(folder / "model")
    write_csv(folder / "sums.csv", ROWS)
    (folder / "judges.py").write_text(JUDGES)
    (folder / "helpers.py").write_text("")
    (folder / "broken.py").write_text("def f(:\n")
    return folder


@pytest.fixture
def folder(made, tmp_path, monkeypatch):
    """A copy of it, which is the working directory."""
    shutil.copytree(made, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def with_(**options: str) -> list[str]:
    """The line, with other values of its options."""
    line = list(ONE_LINE)
    for name, value in options.items():
        line[line.index(f"--{name}") + 1] = value
    return line


@pytest.fixture
def mistake(folder, refused):
    """Run a command that is refused and leaves nothing in the folder."""

    def run(arguments: list[str]) -> str:
        before = sorted(Path().rglob("*"))
        line = refused(*arguments, stray=True)
        after = [each for each in sorted(Path().rglob("*")) if "__pycache__" not in each.parts]
        assert after == before
        return line

    return run


# -- what is said at once: nothing is started -------------------------------------------------------

AT_ONCE = {
    "no such file": (with_(data="sum.csv"), "data.source: there is no file or directory sum.csv"),
    "no such model": (with_(model="./modle"), "model.name = './modle': no such directory"),
    "no model in it": (with_(model="."), "holds no model (neither a config.json nor a GGUF"),
    "no colon": (with_(reward="X"), "reward function X: no built-in has this name; there are: "),
    "no function": (with_(reward="judges.py"), "as in judges.py:even (it has even, gold"),
    "no such function": (with_(reward="judges.py:evn"), "no 'evn' in it; did you mean even?"),
    "syntax": (with_(reward="broken.py:f"), "is not Python: SyntaxError: "),
    "one option alone": (["train", "--data", "sums.csv"], "--model and --reward must be given too"),
    "nothing": (["train"], "a YAML file, or a task of"),
    "options of a file": ([*ONE_LINE, "--data.options", "{foo: 1}"], "options are for reasoning_"),
    "history": ([*ONE_LINE, "--history", "nowhere"], "drafting.history_run: nowhere: no such"),
    "two names": ([*ONE_LINE, "--reward.functions", "[]"], "two names of one field"),
    "underscore": ([*ONE_LINE, "--dry_run"], "did you mean --dry-run?"),
    "dry-run of what": ([*ONE_LINE, "--dry-run=pln"], "invalid choice: 'pln'"),
    "data as a recipe": (["train", "sums.csv"], "sums.csv: is not YAML; prompts are given as --data sums"),
    "a model as a recipe": (["train", "Qwen/Qwen3-8B"], "a model is given as --model Qwen/Qwen3-8B"),
    "rewards as a recipe": (["train", "judges.py"], "rewards are given as --reward judges.py:FUNCTION"),
    "a second recipe": (["train", "demo", "smollm2"], "'demo' is the recipe or file already"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "said"), AT_ONCE.values(), ids=AT_ONCE)
def test_a_mistake_is_one_line_and_leaves_nothing(arguments, said, mistake):
    assert said in mistake(arguments)


# -- what is said when things are loaded -----------------------------------------------------------


def rewritten(rows: list[dict[str, Any]]) -> Callable[[], None]:
    return lambda: write_csv(Path("sums.csv"), rows)


def half_the_weights() -> None:
    path = Path("model/model.safetensors")
    path.write_bytes(path.read_bytes()[:-100])


LOADED: dict[str, tuple[Callable[[], object], list[str], str]] = {
    "column of the reward": (dict, with_(reward="judges.py:gold"), "sums.csv:2: reward function judges.py:gold: takes an argument 'gold', and the data has no such column; there are: answer"),
    "dotted": (dict, with_(reward="helpers.f"), "reward function helpers.f: "),
    "long prompt": (rewritten([*ROWS, {"prompt": "1" * 120, "answer": ""}, *ROWS]), ONE_LINE, "sums.csv:42: the prompt is 120 tokens long; the model's context, less rollout.max_completion_length, leaves 116"),
    "response": (dict, ONE_LINE, "rollout.max_completion_length = 512 leaves no room for a prompt in the model's context of 128"),
    "no tokenizer": (lambda: [each.unlink() for each in Path("model").glob("tokenizer*")], ONE_LINE, "model.name = 'model': the tokenizer cannot be loaded from model: "),
    "no weights": (lambda: Path("model/model.safetensors").unlink(), ONE_LINE, "model holds no weights"),
    "a pointer": (lambda: Path("model/model.safetensors").write_text("version https://git-lfs.github.com"), ONE_LINE, "model.safetensors is a Git LFS pointer"),
    "half the weights": (half_the_weights, ONE_LINE, "the weights cannot be loaded from model: "),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "arguments", "said"), LOADED.values(), ids=LOADED)
def test_a_dry_run_finds_what_would_not_start(spoil, arguments, said, mistake):
    spoil()
    more = [] if "leaves no room" in said else SHORT
    assert said in mistake([*arguments, "--dry-run", *more])


def test_a_directory_that_holds_a_run_is_named(mistake):
    Path("run").mkdir()
    Path("run/events.db").write_text("")
    arguments = [*ONE_LINE, *SHORT, "--run.output_dir", "run"]
    for more in ([], ["--dry-run"], ["--dry-run=plan"]):
        assert "run holds a run already" in mistake(arguments + more)


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_is_one_line_within_seconds(folder):
    """And what is in the cache is taken from there."""
    cached = folder / "hf" / "hub" / "models--some--tiny"
    shutil.copytree("model", cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(folder / "hf")}
    environment.pop("HF_HUB_OFFLINE", None)
    code = (
        "from rhymeflow.cli import main\n"
        f"assert main({[*with_(model='some/tiny'), *SHORT, '--dry-run']}) == 0\n"
        f"raise SystemExit(main({[*with_(model='Qwen/Qwen2.5-0.5B'), '--dry-run=plan']}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, env=environment, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "name: some/tiny" in done.stdout
    for part in (
        "Qwen/Qwen2.5-0.5B", "http://127.0.0.1:9 cannot be reached: Connection refused",
        "local directory", "HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE",
    ):  # fmt: skip
        assert part in line


# -- what is not wrong -----------------------------------------------------------------------------


def test_a_dry_run_prints_what_loads_back(folder, capsys):
    with Path("judges.py").open("a") as file:
        file.write("print('hello')\n")
    two = ["--reward", "exact_match", *SHORT]
    assert cli.main([*ONE_LINE, *two, "--dry-run"]) == 0
    out, err = capsys.readouterr()
    config = parse_config(out)
    assert (config.model.name, config.data.source) == ("model", "sums.csv")
    assert [each.function for each in config.reward.functions] == ["judges.py:even", "exact_match"]
    assert "# prompts of up to 5 tokens, as the data has them" in out
    for what in ("# memory:", "rollout", "learner", "weight store"):
        assert what in out
    assert "hello" in err
    assert not Path("runs").exists()


def test_a_plan_needs_neither_weights_nor_tokenizer_nor_data(folder, capsys, monkeypatch):
    for path in Path("model").iterdir():
        if path.name != "config.json":
            path.unlink()
    Path("sums.csv").unlink()
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", None)
    placed = ["--rollout.num_instances", "2", "--rollout.cpus", "[[0, 1], [2, 3]]"]
    assert cli.main([*ONE_LINE, "--dry-run=plan", *placed]) == 0
    out = capsys.readouterr().out
    assert parse_config(out).rollout.num_instances == 2
    assert "rollout-1          cpu, 2 threads, pinned to cores 2, 3" in out
    assert "prompts of up to 512 tokens, an assumption (data.max_prompt_length says" in out
    assert "# memory:" in out


def test_a_source_given_instead_of_a_recipes_has_none_of_its_sizes(folder, capsys):
    other = ["--data", "sums.csv", "--dry-run=plan"]
    assert cli.main(["train", "smollm2", *other, "--model", "model"]) == 0
    data = parse_config(capsys.readouterr().out).data
    assert (data.source, data.size, data.eval_size, data.options) == ("sums.csv", None, None, {})
    assert data.chat_template is False, "what is done to prompts is no matter of the source"
    assert cli.main(["train", "demo", *other, "--data.size", "9"]) == 0
    assert parse_config(capsys.readouterr().out).data.size == 9
    assert cli.main(["train", "demo", "--data", "recipe:demo", "--dry-run=plan"]) == 0
    assert parse_config(capsys.readouterr().out).data.size == 256
    mine = "data: {source: a.csv, size: 5, eval_source: b.csv, eval_size: 7}\nmodel: {gguf_file: x}"
    config = parse_config(mine, {"data.source": "c.csv", "model.name": "y"})
    assert (config.data.size, config.data.eval_size, config.model.gguf_file) == (None, 7, None)


def test_columns_that_a_function_need_not_be_given(folder):
    config = parse_config("", {"model.name": "model", "data.source": "sums.csv",
                               "rollout.max_completion_length": "12",
                               "reward.functions": "[{function: 'judges.py:optional'}]"})  # fmt: skip
    assert check.everything(config).longest_prompt == 5
    one = config.changed(data={"size": 1, "eval_size": 0})
    assert check.everything(one).longest_prompt == 5


# -- what a run leaves -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trained", "error", "stays"),
    [(None, UserError, False), ("log", UserError, True), ("checkpoint", UserError, True),
     (None, OSError, True)],
)  # fmt: skip
@pytest.mark.parametrize("existed", [False, True])
def test_a_mistake_found_late_leaves_nothing_unless_something_was_trained(
    trained, error, stays, existed, folder
):
    path = Path("a/b/run")
    if existed:
        (path / "logs").mkdir(parents=True)
        (path / "logs" / "mine").write_text("")
    config = parse_config("", {"model.name": "model", "data.source": "sums.csv"})

    def run() -> None:
        with claimed(config, path) as (run_dir, store):
            (run_dir / "logs").mkdir(parents=True, exist_ok=True)
            (run_dir / "logs" / "learner.log").write_text("")
            if existed:
                (run_dir / "notes").write_text("by somebody else, meanwhile")
            store.begin_attempt("{}", now=0.0, started="")
            if trained == "log":
                store.record(1.0, [VersionPublished(1)])
            if trained == "checkpoint":
                (run_dir / "checkpoints" / "step-1").mkdir(parents=True)
            store.commit()
            raise error("late")

    with pytest.raises(error, match="late"):
        run()
    assert (path / "logs" / "learner.log").exists() == stays
    assert (path / "events.db").exists() == stays
    assert (path / "logs" / "mine").exists() == (path / "notes").exists() == existed
    assert Path("a").exists() == (stays or existed)


# -- help ------------------------------------------------------------------------------------------


def shown(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        code = cli.main(arguments)
    except SystemExit as end:
        code = end.code
    assert not code
    return capsys.readouterr().out


def test_help_has_the_sections_and_the_common_fields(capsys):
    text = shown(["train", "--help"], capsys)
    for section in ("model", "data", "rollout", "reward", "learner", "schedule", "run"):
        assert f"\n{section}: " in text
    for path in pages.COMMON:
        assert f"--{path} [" in text
    assert "--learner.learning_rate [1e-06]\n      Peak learning rate of the optimizer.\n" in text
    assert "--learner.adam_beta1" not in text
    assert "rhymeflow train --model DIR_OR_HUB_NAME --data FILE --reward FILE.py:FUNCTION" in text
    assert max(map(len, text.splitlines())) <= 80
    assert shown(["train", "demo", "-h"], capsys) == text == shown(["train", "-h", "demo"], capsys)


def test_all_of_help_has_every_field_with_its_meaning(capsys):
    lines = shown(["train", "--help=all"], capsys).splitlines()
    assert max(map(len, lines)) <= 80
    inner = [path for path in field_paths() if f"{path}." in " ".join(field_paths())]
    for path in set(field_paths()) - set(inner):
        (at,) = [n for n, line in enumerate(lines) if line.startswith(f"  --{path} [")]
        assert len(lines[at + 1].strip()) > 8, path


def test_help_on_a_section_or_a_field(capsys, refused):
    assert "--simulation.workload.sigma" in shown(["simulate", "--help"], capsys)
    assert "simulation" not in shown(["train", "--help"], capsys)
    section = shown(["train", "--help=learner"], capsys)
    assert section.startswith("learner: ")
    assert "--learner.adam_beta1" in section
    assert shown(["train", "-h", "learner"], capsys) == section, "as a word of its own"
    assert shown(["train", "--help=learner.beta"], capsys).count("--learner.") == 1
    assert "did you mean learner?" in refused("train", "--help=learnr")


def test_help_may_be_asked_as_a_command(capsys):
    for command in ([], ["train"]):
        assert shown(["help", *command], capsys) == shown([*command, "--help"], capsys)
    text = shown([], capsys)
    assert text == shown(["--help"], capsys)
    assert "train a policy" in text
