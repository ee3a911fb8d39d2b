"""A teacher of a run: what is refused, what it reads, and a run that learns from one."""

from __future__ import annotations

import io
import re
from contextlib import closing
from typing import Any

import pytest
import torch
from rich.console import Console

from rhymeflow import check, memory
from rhymeflow.config import Config, DistillationConfig, ModelConfig
from rhymeflow.config.load import build_config, read_config
from rhymeflow.data.prompts import Prompt, told
from rhymeflow.learner.ranks import Ranks
from rhymeflow.models.adapter_files import adapter_for
from rhymeflow.models.lora import adapter_in, draw_adapter, load_policy, save_adapter, versioned
from rhymeflow.models.tokenizer import check_teacher, load_tokenizer
from rhymeflow.observe import inspect, metrics, query
from rhymeflow.runtime.resume_options import check_change
from rhymeflow.runtime.train import train
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.writer import SqliteTrajectoryStore
from rhymeflow.workers.learner import LearnerProcess
from rhymeflow.workers.restore import teacher_prompts
from tests.refused import refusal
from tests.runtime.tiny import save_model, tiny_config

NAME = "learner.distillation"
URL = "http://here:1/v1"
MISTAKES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"weight": 2}, {}, "weight has no effect without a teacher"),
    ({"teacher": "a/b", "retries": 2}, {}, "retries has no effect without a teacher on a server"),
    ({"teacher": "a/b", "topk": 2}, {}, "topk has no effect without mode topk_logits"),
    ({"teacher": "a/b", "jsd_beta": 0}, {}, "jsd_beta has no effect without mode topk_logits or"),
    ({"teacher": URL, "mode": "full_logits"}, {}, "a server returns log-probabilities"),
    ({"teacher": "policy"}, {}, "needs a prompt: else it agrees with the policy"),
    ({"teacher": "a/b", "mode": "topk_logits", "add_tail": False}, {}, "needs jsd_beta = 0, not 1"),
    ({"teacher": "a/b"}, {"rollout.top_p": 0.5}, "leave out tokens of the teacher's"),
    ({"teacher": URL}, {"rollout.temperature": 0.5}, "a server .* are those of temperature 1"),
    ({"teacher": "start", "prompt": "x"}, {"environment.tools": ["a.b"]}, "not with environments"),
    (
        {"teacher": "a/b", "reward_weight": 0}, {"schedule.filter_zero_variance": True},
        "no group's rewards differ",
    ),
    ({"teacher": "a/b"}, {"rollout.num_generations": 1}, "leaves no group to compare with"),
]  # fmt: skip


@pytest.mark.parametrize(("distillation", "others", "said"), MISTAKES)
def test_mistakes_are_named(distillation, others, said) -> None:
    given = {f"{NAME}.{name}": value for name, value in distillation.items()}
    assert re.search(said, refusal(build_config, {**given, **others}, where="T"))


def test_without_rewards_a_teacher_is_enough() -> None:
    given = {f"{NAME}.teacher": "a/b", "reward.functions": [], "rollout.num_generations": 1}
    given |= {"data.eval_size": 0}
    config = build_config(given, where="T")
    assert not config.trains_on_rewards
    other = build_config({f"{NAME}.teacher": "c/d"}, config, where="T")
    assert "learner.distillation.teacher: cannot be changed" in refusal(
        check_change, config, other, 0
    )
    here, there = (
        build_config({f"{NAME}.teacher": u}, config, where="T") for u in (URL, URL + "2")
    )
    check_change(here, there, 0)  # a server may move


def test_a_teacher_with_other_tokens_or_no_files_is_refused(tmp_path) -> None:
    tokenizer = load_tokenizer(tiny_config(tmp_path).model)
    said = refusal(check_teacher, ModelConfig(name="recipe:demo"), tokenizer)
    assert said.startswith("'recipe:demo': ")
    assert said.endswith("others differ; a teacher needs the policy's vocabulary")
    gone = tiny_config(tmp_path, learner={"distillation": {"teacher": str(tmp_path / "gone")}})
    said = refusal(check.before_start, gone)
    assert said.startswith("learner.distillation.teacher: model.name = ")


def test_a_teacher_may_be_an_adapter(tmp_path, monkeypatch) -> None:
    """It is the model with it, whole or for ranks, and has nothing of the policy's adapter."""
    config = tiny_config(tmp_path, model={"lora": {"rank": 2, "target_modules": ["q_proj"]}})
    cpu = torch.device("cpu")
    tokenizer = load_tokenizer(config.model)
    model = load_policy(config.model, dtype=torch.float32, device=cpu, seed=0)
    draw_adapter(model)
    (directory := tmp_path / "adapter").mkdir()
    save_adapter(directory, adapter_in(model), config.model.name, versioned(model))
    tokenizer.save_pretrained(directory)

    @torch.no_grad()
    def logits(model):
        model.set_attn_implementation("eager")
        return model(torch.tensor([[3, 4, 5]])).logits

    expected = logits(model)
    process = LearnerProcess.__new__(LearnerProcess)
    process.config = config
    own = ModelConfig(name=str(directory))
    found = process._teacher(own, tokenizer, torch.float32, cpu)["teacher"]
    torch.testing.assert_close(logits(found), expected)
    process.ranks = Ranks(0, 2)
    sharded = process._teacher(own, tokenizer, torch.float32, cpu)
    with torch.no_grad():
        for name, each in sharded["teacher"].named_parameters():
            each.copy_(sharded["read_teacher"](name, slice(0, len(each))))
    torch.testing.assert_close(logits(sharded["teacher"]), expected)
    proved = []
    monkeypatch.setattr(check, "prove", lambda config, **_: proved.append(config.model))
    teaching = config.changed(learner={"distillation": DistillationConfig(teacher=str(directory))})
    check._check_teacher(teaching, tokenizer, [])
    assert [adapter_for(each).directory for each in proved] == [directory]


def test_the_teachers_prompt_takes_the_rows_columns() -> None:
    columns = {"answer": 7, "set": {1}}
    found = told(Prompt(0, "1+6?", columns), "{prompt} It is {answer}, of {{1, 2}}: ")
    assert found.prompt == "1+6? It is 7, of {{1, 2}}: "
    messages = [{"role": "user", "content": "1+6?"}, {"role": "assistant", "content": "It"}]
    found = told(Prompt(0, messages, columns), "{answer}: {prompt}")
    assert found.prompt == [{"role": "user", "content": "7: 1+6?"}, messages[1]]
    said = refusal(told, Prompt(0, "1+6?", columns, "f.jsonl:3"), "{anwser}")
    assert "f.jsonl:3: learner.distillation.prompt: there is no column 'anwser'" in said
    assert said.endswith("'anwser'; did you mean answer?")


def test_the_learner_makes_the_teachers_prompt_of_the_stored_row(tmp_path) -> None:
    distillation = {"teacher": "policy", "prompt": "{prompt}{answer}="}
    config = tiny_config(tmp_path, learner={"distillation": distillation})
    tokenizer = load_tokenizer(config.model)
    with closing(SqliteTrajectoryStore(tmp_path / "events.db")) as store:
        ids, columns = tokenizer.encode("12+3?"), {"answer": "15"}
        store.put_group(3, row=0, epoch=0, prompt="12+3?", prompt_tokens=ids, columns=columns)
        store.commit()
        with closing(TrajectoryReader(store.path)) as reader:
            assert teacher_prompts(reader, Config()) is None
            read = teacher_prompts(reader, config)
            assert tokenizer.decode(read(3)) == "12+3?15="


def test_a_run_learns_from_a_teacher_that_is_told_the_answer(tmp_path) -> None:
    """Without rewards, which nothing then shows, and with gradients that are accumulated early."""
    distillation = {"teacher": str(save_model(tmp_path / "teacher", seed=3)), "mode": "full_logits"}
    config = tiny_config(
        tmp_path, reward={"functions": []}, data={"eval_size": 0},
        learner={"max_steps": 3, "distillation": {**distillation, "prompt": "{answer}{prompt}"}},
    )  # fmt: skip
    told = io.StringIO()
    train(config, console=Console(file=told, width=200))
    rows = metrics.read(tmp_path / "run")
    assert len(rows) == 3
    assert all(row["distillation/divergence"] > 0.0 for row in rows.values())
    assert not [name for row in rows.values() for name in row if "reward" in name]
    assert all(row["grad_norm"] > 0.0 for row in rows.values())
    inspect.inspect(tmp_path / "run", inspect.Question(), Console(file=told, width=200))
    with closing(TrajectoryReader(tmp_path / "run" / "events.db")) as reader:
        (best,) = query.rewarded(reader, "best", 1)
        assert (best["reward"], best["components"]) == (None, {})
        assert reader.query("SELECT DISTINCT reward FROM trained") == [(None,)]
    assert {*re.findall(r"reward\S* +\S+", told.getvalue())} == {"reward functions", "reward -,"}
    apart = [row["distillation/divergence"] for row in rows.values()]
    assert told.getvalue().count("from teacher") == 5, "of each step, at the end and in `inspect`"
    assert f"{apart[0]:.4f} first, {apart[-1]:.4f} last" in told.getvalue()


def test_the_recipe_has_the_demos_policy_and_a_teacher_with_its_tokens() -> None:
    config = read_config("distill")
    assert config.teacher_model is not None
    check_teacher(config.teacher_model, load_tokenizer(config.model))
    assert not config.trains_on_rewards
    parts = memory.here(config, memory.model_here(config), 100)
    (size,) = [part.num_bytes for name, part in parts if part.what == "teacher"]
    assert size == memory.model_here(config).weights
