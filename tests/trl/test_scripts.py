"""Scripts in the shape of those that TRL publishes, run as they are but for the import."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import trl.scripts
from huggingface_hub import ModelCard

from rhymeflow import recipes
from rhymeflow.observe import metrics

SCRIPTS = Path(__file__).parent / "scripts"
DEMO = recipes.directory("demo")

pytestmark = pytest.mark.slow


def test_a_script_without_a_guard_runs_once(run_script: Callable[..., str], tmp_path: Path) -> None:
    printed = run_script(SCRIPTS / "one_reward.py", DEMO, "out")
    assert printed.count("STEPS 2 3") == 1
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_several_rewards_and_callbacks(run_script: Callable[..., str], tmp_path: Path) -> None:
    assert "EVALUATED" in run_script(SCRIPTS / "several_rewards.py", DEMO, "out")
    kept = (tmp_path / "out" / "extra.jsonl").read_text().splitlines()
    assert all('"column":"length"' in line for line in kept)
    results = json.loads((tmp_path / "out" / "eval_results.json").read_text())
    assert results == json.loads((tmp_path / "out" / "all_results.json").read_text())
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.datasets, card.data.tags) == ("sums", ["grpo", "rhymeflow", "short"])


@pytest.mark.parametrize("name", ["grpo", "rloo", "distillation"])
def test_trls_own_script(
    run_script: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As it is installed, with its import changed: rewards by name, a dataset from a folder."""
    text = (Path(trl.scripts.__file__).parent / f"{name}.py").read_text()
    (tmp_path / f"{name}.py").write_text(text.replace("from trl", "from rhymeflow.trl"))
    (tmp_path / "rewards_here.py").write_text(
        "def right(completions, answer, **columns):\n"
        "    return [float(c.endswith(f' ={a}')) for c, a in zip(completions, answer)]\n"
    )
    rows = [{"prompt": f"a{n} b{n}?", "answer": 2 * n} for n in range(10)]
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.syspath_prepend(tmp_path)
    rewards = ["--reward_funcs", "rewards_here.right", "get_soft_overlong_punishment"]
    judged = [*rewards, "--num_generations", "4"]
    taught = ["--teacher_model_name_or_path", recipes.directory("distill")]
    printed = run_script(
        tmp_path / f"{name}.py",
        *("--model_name_or_path", DEMO, "--dataset_name", "rows", "--output_dir", "out"),
        *("--per_device_train_batch_size", "4", "--use_cpu", "true"),
        *("--max_completion_length", "32", "--max_steps", "2", "--report_to", "none"),
        *("--logging_steps", "1"),
        *(taught if name == "distillation" else judged),
    )
    assert "Training completed" in printed
    assert (tmp_path / "out" / "model.safetensors").is_file()
    last = metrics.read(tmp_path / "out")[2]
    assert math.isfinite(last["loss"])
    assert ("distillation/divergence" in last) == (name == "distillation")
    assert ("algorithm: rloo" in (tmp_path / "out" / "config.yaml").read_text()) == (name == "rloo")
