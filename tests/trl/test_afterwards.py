"""What a trainer has when it has trained; one short run serves most of it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from rhymeflow import Trainer, recipes
from rhymeflow.trl import GRPOConfig, GRPOTrainer
from tests.refused import refusal

ROWS = [{"prompt": f"a{n} b{n}?", "answer": 2 * n} for n in range(8)]
DEMO = str(recipes.directory("demo"))

pytestmark = pytest.mark.slow


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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    trainer = made(tmp_path_factory.mktemp("run"))
    result = trainer.train()
    assert result.global_step == 2
    assert result.training_loss == result.metrics["train_loss"]
    return trainer


def test_the_state_is_transformers(trained: GRPOTrainer) -> None:
    state = trained.state
    assert (state.global_step, state.max_steps) == (2, 2)
    assert [each["step"] for each in state.log_history[:2]] == [1, 2]
    assert {"loss", "grad_norm", "learning_rate", "reward", "reward_std"} <= set(
        state.log_history[0]
    )
    assert state.log_history[0]["rewards/lambda/mean"] == state.log_history[0]["reward"]
    assert state.log_history[2]["train_runtime"] > 0
    assert state.epoch == pytest.approx(2 / 8)
    assert trained.is_world_process_zero()


def test_the_model_is_the_trained_one(trained: GRPOTrainer, tmp_path: Path) -> None:
    before = AutoModelForCausalLM.from_pretrained(DEMO).state_dict()
    after = trained.model.state_dict()
    assert any((after[name].float() != before[name].float()).any() for name in before)
    trained.save_model(str(tmp_path / "saved"))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all((after[name].float() == saved[name].float()).all() for name in saved)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").vocab_size
    assert not (tmp_path / "saved" / "learner.pt").exists()
    assert trained.processing_class.vocab_size


def test_it_is_evaluated(trained: GRPOTrainer) -> None:
    found = trained.evaluate()
    assert 0 <= found["eval_reward"] <= 6
    assert math.isfinite(found["eval_completions/mean_length"])
    assert trained.state.log_history[-1]["eval_reward"] == found["eval_reward"]
    several = trained.evaluate({"a": ROWS[:1], "b": ROWS[1:2]}, metric_key_prefix="test")
    assert {"test_a_reward", "test_b_reward"} <= set(several)
    bare = Trainer(model=DEMO, config={"output_dir": str(trained.run_dir / "bare")})
    assert "needs an eval_dataset" in refusal(bare.evaluate)


def test_it_is_pushed_to_the_hub(trained: GRPOTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Hub:
        def __init__(self, token: str | None) -> None:
            calls.append(token)

        def create_repo(self, repo_id: str, **named: Any) -> Any:
            calls.append((repo_id, named))
            return SimpleNamespace(repo_id=repo_id)

        def upload_folder(self, *, folder_path: str, **named: Any) -> str:
            calls.append((sorted(each.name for each in Path(folder_path).iterdir()), named))
            return "commit"

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    assert trained.push_to_hub("message", dataset_name="ignored") == "commit"
    token, created, (names, uploaded) = calls
    assert token == "secret"
    assert created == ("someone/model", {"private": None, "exist_ok": True})
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names)
    assert "learner.pt" not in names
    assert (uploaded["repo_id"], uploaded["commit_message"]) == ("someone/model", "message")


def test_train_again_goes_on_from_there(trained: GRPOTrainer) -> None:
    first = trained.run_dir
    trained.train()
    assert trained.run_dir.name == "out-2"
    assert Path(trained.config.model.name) == first / "checkpoints" / "step-2"
    assert trained.state.global_step == 2


def test_a_run_that_was_stopped_is_gone_on_with(tmp_path: Path) -> None:
    class Once(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_training_stop = True
            return control

    first = made(tmp_path, callbacks=[Once])
    assert first.train().global_step == 1
    second = made(tmp_path)
    assert second.train(resume_from_checkpoint=True).global_step == 2
    assert [each["step"] for each in second.state.log_history[:2]] == [1, 2]
    assert second.run_dir == first.run_dir


def test_of_a_trainer_that_did_not_train_there_is_what_it_was_given(tmp_path: Path) -> None:
    trainer = made(tmp_path)
    before = AutoModelForCausalLM.from_pretrained(DEMO).state_dict()
    now = trainer.model.state_dict()
    assert all((now[name].float() == before[name].float()).all() for name in before)
    assert trainer.state.log_history == []


@pytest.mark.parametrize("watched", [False, True])
def test_the_best_model_is_the_one_at_the_end(tmp_path: Path, watched: bool) -> None:
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
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for step in (1, 3):
        shutil.copytree(DEMO, tmp_path / "checkpoints" / f"step-{step}")
    trainer._has_begun = True
    trainer._after_training(1.0)
    assert str(trainer.checkpoint).endswith("step-1")
    assert trainer.model.name_or_path == str(trainer.checkpoint)
    assert trainer.state.best_model_checkpoint == str(trainer.checkpoint)
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (1.0, 1)
