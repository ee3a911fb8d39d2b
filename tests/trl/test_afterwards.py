"""What a trainer has when it has trained: of runs whose metrics and checkpoints are made up."""

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from rhymeflow import Trainer, recipes
from rhymeflow.config import Config
from rhymeflow.runtime import train as runs
from rhymeflow.trl import GRPOConfig, GRPOTrainer
from rhymeflow.trl.trainer import CheckpointLinks
from tests.refused import refusal

ROWS = [{"prompt": f"a{n} b{n}?", "answer": 2 * n} for n in range(8)]
DEMO = str(recipes.directory("demo"))
LEFT = [{"step": n, "time": n, "loss": n / 4, "reward": 3.0} for n in (1, 2)]


def made(tmp_path: Path, **given: Any) -> GRPOTrainer:
    args = GRPOConfig(
        str(tmp_path / "out"), 4, max_steps=2, num_generations=4, max_completion_length=8,
        learning_rate=1e-3, logging_steps=1, use_cpu=True, save_strategy="no",
        hub_model_id="someone/model", hub_token="secret", lr_scheduler_type="constant",
        temperature=4.0,
    )  # fmt: skip
    given = {
        "reward_funcs": lambda completions, **columns: [sum(map(ord, c)) % 7 for c in completions],
        **given,
    }
    return GRPOTrainer(DEMO, args=args, train_dataset=ROWS, eval_dataset=ROWS[:2], **given)


def leave(run_dir: Path, rows: list[dict[str, float]], checkpoints: tuple[int, ...]) -> None:
    """Leave what a run leaves: metrics, and checkpoints whose weights are each another's."""
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for step in checkpoints:
        folder = run_dir / "checkpoints" / f"step-{step}"
        shutil.copytree(DEMO, folder)
        (folder / "learner").mkdir()
        weights = load_file(folder / "model.safetensors")
        changed = {name: weight + step for name, weight in weights.items()}
        save_file(changed, folder / "model.safetensors", {"format": "pt"})


@contextmanager
def training_is_made_up() -> Iterator[list[Config]]:
    """Let training take two steps; what it was to train is returned."""
    begun: list[Config] = []

    def attempt(config: Config, run_dir: Path, *_: Any, **__: Any) -> Any:
        begun.append(config)
        leave(run_dir, LEFT, (2,))
        return SimpleNamespace(seconds=1.5, trajectories=8)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "attempt", attempt)
        patch.setattr(runs, "prepare", lambda config: None)
        yield begun


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    trainer = made(tmp_path_factory.mktemp("run"))
    with training_is_made_up():
        result = trainer.train()
    assert (result.global_step, result.training_loss) == (2, 0.375)
    assert result.metrics["train_loss"] == 0.375
    return trainer


def test_the_state_is_transformers(trained):
    state = trained.state
    assert (state.global_step, state.max_steps) == (2, 2)
    assert [each["step"] for each in state.log_history[:2]] == [1, 2]
    assert (state.log_history[0]["loss"], state.log_history[2]["train_runtime"]) == (0.25, 1.5)
    assert state.epoch == pytest.approx(2 / 8)
    assert trained.is_world_process_zero()


def test_the_model_is_the_trained_one(trained, tmp_path):
    before = AutoModelForCausalLM.from_pretrained(DEMO).state_dict()
    after = trained.model.state_dict()
    assert any((after[name].float() != before[name].float()).any() for name in before)
    trained.save_model(str(tmp_path / "saved"))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all((after[name].float() == saved[name].float()).all() for name in saved)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").vocab_size
    assert not (tmp_path / "saved" / "learner").exists()
    assert trained.processing_class.vocab_size


@pytest.mark.slow
def test_it_is_evaluated(trained):
    found = trained.evaluate()
    assert 0 <= found["eval_reward"] <= 6
    assert math.isfinite(found["eval_completions/mean_length"])
    assert trained.state.log_history[-1]["eval_reward"] == found["eval_reward"]
    several = trained.evaluate({"a": ROWS[:1], "b": ROWS[1:2]}, metric_key_prefix="test")
    assert {"test_a_reward", "test_b_reward"} <= set(several)
    bare = Trainer(model=DEMO, config={"output_dir": str(trained.run_dir / "bare")})
    assert "needs an eval_dataset" in refusal(bare.evaluate)


def test_it_is_pushed_to_the_hub(trained, monkeypatch):
    calls: list[Any] = []

    class Hub:
        def __init__(self, token: str | None) -> None:
            calls.append(token)

        def create_repo(self, repo_id: str, **named: Any) -> Any:
            calls.append((repo_id, named))
            return SimpleNamespace(repo_id=repo_id)

        def upload_folder(self, *, folder_path: str, **named: Any) -> str:
            calls.append((sorted(each.name for each in Path(folder_path).iterdir()), named))
            calls.append(ModelCard.load(Path(folder_path) / "README.md").data.datasets)
            return "commit"

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    assert trained.push_to_hub("message", dataset_name="sums") == "commit"
    token, created, (names, uploaded), datasets = calls
    assert (datasets, trained.hub_model_id) == ("sums", "someone/model")
    assert token == "secret"
    assert created == ("someone/model", {"private": None, "exist_ok": True})
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names)
    assert "learner" not in names
    assert (uploaded["repo_id"], uploaded["commit_message"]) == ("someone/model", "message")


def test_train_again_goes_on_from_there(trained):
    first = trained.run_dir
    with training_is_made_up() as begun:
        assert trained.train().global_step == 2
    assert trained.run_dir == first.with_name("out-2")
    assert [Path(each.model.name) for each in begun] == [first / "checkpoints" / "step-2"]


def test_checkpoints_are_where_scripts_look_and_resume_from_there(tmp_path, monkeypatch):
    run_dir, resumed = tmp_path / "out", list[Path]()
    run_dir.mkdir()
    links = CheckpointLinks(lambda: run_dir)
    leave(run_dir, LEFT, (1, 2))
    for step in (1, 2, 2):
        path = str(run_dir / "checkpoints" / f"step-{step}")
        links.on_save(None, SimpleNamespace(global_step=4 * step), None, checkpoint=path)
    shutil.rmtree(run_dir / "checkpoints" / "step-1")
    assert get_last_checkpoint(str(run_dir)) == str(run_dir / "checkpoint-8")
    links.on_save(None, SimpleNamespace(global_step=8), None, checkpoint=path)
    assert [each.name for each in run_dir.glob("checkpoint-*")] == ["checkpoint-8"]
    (run_dir / "events.db").touch()
    (tmp_path / "out-2").mkdir()
    (tmp_path / "out-2" / "events.db").touch()

    def resume(run_dir: Path, *_: Any, begin: Any, **__: Any) -> Any:
        resumed.append(run_dir)
        begin(run_dir)  # and there is nothing to do
        return SimpleNamespace(seconds=1.5, trajectories=8)

    monkeypatch.setattr(runs, "resume", resume)
    for given in (True, str(run_dir / "checkpoint-8"), tmp_path / "out-2" / "checkpoint-8"):
        made(tmp_path).train(resume_from_checkpoint=given)
    assert [each.name for each in resumed] == ["out-2", "out", "out-2"]
    elsewhere = refusal(made(tmp_path).train, resume_from_checkpoint=tmp_path / "other")
    assert "is not in the run directory" in elsewhere
    watched = made(tmp_path, callbacks=[TrainerCallback])
    assert watched.train(resume_from_checkpoint=run_dir).global_step == 2
    assert [each["step"] for each in watched.state.log_history] == [1, 2, 2]


def test_of_a_trainer_that_did_not_train_there_is_what_it_was_given(tmp_path):
    trainer = made(tmp_path)
    before = AutoModelForCausalLM.from_pretrained(DEMO).state_dict()
    now = trainer.model.state_dict()
    assert all((now[name].float() == before[name].float()).all() for name in before)
    assert trainer.state.log_history == []


@pytest.mark.parametrize("watched", [False, True])
def test_the_best_model_is_the_one_at_the_end(tmp_path, watched):
    args = GRPOConfig(
        str(tmp_path), 4, max_steps=3, num_generations=4, use_cpu=True, eval_strategy="steps",
        eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
    )  # fmt: skip
    trainer = GRPOTrainer(
        DEMO, len, args, ROWS, ROWS[:2], callbacks=[TrainerCallback] if watched else None
    )
    if watched:
        trainer._callback_observer()
    rows = [{"step": step, "loss": 0.5, "eval/reward": 1.0 / step} for step in (1, 2, 3)]
    leave(tmp_path, rows, (1, 3))
    trainer._has_begun = True
    trainer._after_training(1.0)
    assert str(trainer.checkpoint).endswith("step-1")
    assert trainer.model.name_or_path == str(trainer.checkpoint)
    assert trainer.state.best_model_checkpoint == str(trainer.checkpoint)
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (1.0, 1)
