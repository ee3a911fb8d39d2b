"""Scripts in the shape of those that TRL publishes, run as they are but for the import."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trl.scripts
from huggingface_hub import ModelCard

from rhymeflow import recipes
from rhymeflow.config.load import read_config
from rhymeflow.observe import metrics

SCRIPTS = Path(__file__).parent / "scripts"
DEMO = recipes.directory("demo")

pytestmark = pytest.mark.slow


def test_a_script_without_a_guard_runs_once(run_script, tmp_path):
    printed = run_script(SCRIPTS / "one_reward.py", DEMO, "out")
    assert printed.count("STEPS 2 3") == 1
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_several_rewards_and_callbacks(run_script, tmp_path):
    assert "EVALUATED" in run_script(SCRIPTS / "several_rewards.py", DEMO, "out")
    kept = (tmp_path / "out" / "extra.jsonl").read_text().splitlines()
    assert all('"column":"length"' in line for line in kept)
    results = json.loads((tmp_path / "out" / "eval_results.json").read_text())
    assert results == json.loads((tmp_path / "out" / "all_results.json").read_text())
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.datasets, card.data.tags) == ("sums", ["grpo", "rhymeflow", "short"])


MESSAGES = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def written_rows(folder: Path, **columns: Callable[[int], Any]) -> None:
    """Rows for training and for evaluation, as `load_dataset` reads a folder."""
    folder.mkdir()
    for split, numbers in (("train", range(10)), ("test", range(4))):
        rows = [{name: value(n) for name, value in columns.items()} for n in numbers]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))


RECIPE = """
model_name_or_path: {model}
model_revision: main
dtype: float32
attn_implementation: sdpa
chat_template: "{template}"
system_prompt: "Add up "
dataset_name: rows
use_peft: true
lora_target_modules: [q_proj, v_proj]
reward_funcs: [accuracy, length, format]
callbacks: [counting]
do_eval: true
eval_strategy: steps
eval_steps: 100
gradient_accumulation_steps: 1
steps_per_generation: 2
importance_sampling_level: sequence
gradient_checkpointing: true
gradient_checkpointing_kwargs: {{use_reentrant: false}}
learning_rate: 1.0e-04
log_completions: true
log_level: warning
logging_steps: 1
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {{min_lr_rate: 0.1}}
max_completion_length: 24
max_steps: -1
num_train_epochs: 1
num_generations: 4
output_dir: out
per_device_eval_batch_size: 16
per_device_train_batch_size: 20
save_strategy: epoch
save_total_limit: 1
seed: 42
"""


def test_a_recipe_and_options_of_its_own(run_script, tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(model=DEMO, template=MESSAGES))
    written_rows(tmp_path / "rows", problem=lambda n: f"a{n} b{n}?", answer=lambda n: 2 * n)
    printed = run_script(SCRIPTS / "own_config.py", "--config", "recipe.yaml", "--longest", "500")
    assert "SAVED Add up  2 adapter_config.json" in printed
    assert "LAST out/checkpoint-2\n" in printed
    assert "lora_dropout = 0.05: there is no dropout" in printed
    assert "eval_rewards/short/mean" in printed
    results = json.loads((tmp_path / "out" / "all_results.json").read_text())
    assert (results["train_samples"], results["eval_samples"]) == (10, 4)
    assert {"eval_rewards/accuracy/mean", "eval_rewards/short/mean"} <= set(results)
    assert ModelCard.load(tmp_path / "out" / "README.md").data.datasets == "rows"
    assert (tmp_path / "out" / "trainer_state.json").is_file()
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    learner = read_config(str(tmp_path / "out" / "config.yaml")).learner
    assert (learner.ratio, learner.num_minibatches) == ("sequence", 2)


@pytest.mark.parametrize("name", ["grpo", "rloo", "distillation"])
def test_trls_own_script(run_script, tmp_path, monkeypatch, name):
    """As it is installed, with its import changed: rewards by name, a dataset from a folder."""
    text = (Path(trl.scripts.__file__).parent / f"{name}.py").read_text()
    (tmp_path / f"{name}.py").write_text(text.replace("from trl", "from rhymeflow.trl"))
    (tmp_path / "rewards_here.py").write_text(
        "def right(completions, answer, **columns):\n"
        "    return [float(c.endswith(f' ={a}')) for c, a in zip(completions, answer)]\n"
    )
    written_rows(tmp_path / "rows", prompt=lambda n: f"a{n} b{n}?", answer=lambda n: 2 * n)
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
