"""`GRPOTrainer`: TRL's arguments become a configuration, or a line that says what to do."""

import asyncio
import json
import os
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import trl.rewards
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import rhymeflow.trl
from rhymeflow import recipes
from rhymeflow.config import LoraConfig
from rhymeflow.errors import UserError
from rhymeflow.trl import (
    DistillationConfig,
    DistillationTrainer,
    GRPOConfig,
    GRPOTrainer,
    RLOOConfig,
    RLOOTrainer,
    rewards,
)
from rhymeflow.trl.fields import CHECKPOINTING, MAPPED, SAME, by_name
from tests.refused import refusal
from tests.trl.test_fields import HERE

ROWS = [{"prompt": f"p{number}", "answer": number} for number in range(40)]


def fine(completions: list[str], **columns: Any) -> list[float]:
    return [1.0] * len(completions)


def made(tmp_path: Path, trainer: dict[str, Any] | None = None, **fields: Any) -> GRPOTrainer:
    args = GRPOConfig(**{"output_dir": str(tmp_path / "out"), **fields})
    given = {"reward_funcs": fine, "args": args, "train_dataset": ROWS, **(trainer or {})}
    return GRPOTrainer("some/model", **given)


def test_trls_defaults_hold_where_ours_are_others_and_its_order_of_arguments(
    tmp_path,
):
    args = GRPOConfig(str(tmp_path / "out"))
    trainer = GRPOTrainer("some/model", [fine], args, ROWS, ROWS[:2], None, None, [], (None, None))
    found = trainer.config.model_dump(mode="json")
    for path, value in {
        "model.name": "some/model",
        "learner.lr_scheduler_type": "linear",
        "learner.epsilon_high": None,
        "learner.gradient_checkpointing": True,
        "learner.groups_per_batch": 1,
        "learner.max_steps": 120,  # three epochs of 40 rows
        "run.seed": 42,
        "run.save_steps": 500,
        "run.save_seconds": 0.0,
        "run.save_total_limit": 0,
        "run.report_to": [],
        "run.eval_temperature": 1.0,
        "data.chat_template": False,
        "data.eval_source": str(tmp_path / "out" / "inputs" / "eval.jsonl"),
        "data.eval_size": 0,  # eval_strategy is no
    }.items():
        section, _, name = path.partition(".")
        assert found[section][name] == value, path


def test_steps_are_trls_and_versions_ours(tmp_path, capsys):
    trainer = made(
        tmp_path, num_generations=4, gradient_accumulation_steps=2, steps_per_generation=4,
        num_iterations=2, max_steps=10, logging_steps=4, save_steps=0.5, warmup_steps=0.4,
        eval_strategy="steps", eval_steps=8, trainer={"eval_dataset": ROWS[:3]},
    )  # fmt: skip
    learner, run = trainer.config.learner, trainer.config.run
    assert (learner.groups_per_batch, learner.num_minibatches, learner.num_iterations) == (8, 2, 2)
    assert learner.max_steps == 3  # of 4 steps each
    assert "there will be 12 steps" in capsys.readouterr().out
    assert (trainer.rhythm.every, trainer.rhythm.steps_per_version) == (1, 4)
    assert (run.save_steps, run.eval_steps, learner.warmup_steps) == (2, 2, 1)
    assert trainer.config.data.eval_size == 3
    assert trainer.state.max_steps == 12


@pytest.mark.parametrize(
    ("field", "path", "value"),
    [
        ({"scale_rewards": False}, "learner.scale_rewards", "none"),
        ({"scale_rewards": "batch"}, "learner.scale_rewards", "batch"),
        ({"max_grad_norm": 0.0}, "learner.max_grad_norm", None),
        ({"bf16": False}, "model.dtype", "float32"),
        ({"model_init_kwargs": {"torch_dtype": "bfloat16"}}, "model.dtype", "bfloat16"),
        ({"use_cpu": True}, "model.device", "cpu"),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5},
         "learner.warmup_steps", 5),
        ({"lr_scheduler_type": "constant", "warmup_steps": 5}, "learner.warmup_steps", 0),
        ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
         "learner.min_lr_rate", 0.1),
        ({"lr_scheduler_type": "cosine_with_min_lr", "learning_rate": 4e-6,
          "lr_scheduler_kwargs": '{"min_lr": 1e-6}'}, "learner.min_lr_rate", 0.25),
        ({"optim": "adamw_bnb_8bit"}, "learner.optimizer", "adamw_8bit"),
        ({"save_strategy": "no"}, "run.save_steps", 0),
        ({"save_strategy": "epoch"}, "run.save_steps", 40),
        ({"save_total_limit": 3}, "run.save_total_limit", 3),
        ({"report_to": "tensorboard"}, "run.report_to", ("tensorboard",)),
        ({"run_name": "mine"}, "name", "mine"),
        ({"shuffle_dataset": False}, "data.shuffle", False),
        ({"chat_template_kwargs": {"a": 1}}, "data.chat_template_kwargs", {"a": 1}),
        ({"use_vllm": True}, "rollout.vllm_gpu_memory_utilization", 0.3),
        ({CHECKPOINTING: False}, "learner.gradient_checkpointing", False),
        ({"gradient_checkpointing": False}, "learner.gradient_checkpointing", False),
        ({"rhymeflow": '{"beta": 0.5}'}, "learner.beta", 0.5),
        ({"loss_type": "grpo"}, "learner.loss_type", "grpo"),
        ({"loss_type": "sapo"}, "learner.surrogate", "sigmoid"),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "learner.epsilon_high", 4.0),
        ({"importance_sampling_level": "sequence"}, "learner.ratio", "sequence"),
        ({"delta": 2.0}, "learner.delta", 2.0),
        ({"generation_kwargs": {"stop": "</a>"}}, "rollout.stop", ("</a>",)),
        ({"generation_kwargs": {"stop": None, "stop_strings": ["b", "c"]}},
         "rollout.stop", ("b", "c")),
        ({"entropy_coef": 0.1}, "learner.entropy_coef", 0.1),
        ({"use_vllm": True}, "learner.off_policy_level", "sequence"),
        ({"use_vllm": True}, "learner.importance_sampling_cap", 3.0),
        ({"use_vllm": True}, "learner.off_policy_correction", "decoupled"),
        ({"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
         "learner.off_policy_correction", "tis"),
        ({"use_vllm": True, "vllm_importance_sampling_clip_min": 0.5},
         "learner.importance_sampling_floor", 0.5),
        ({"use_vllm": True, "vllm_importance_sampling_correction": False},
         "learner.off_policy_correction", "proximal"),
        ({"top_entropy_quantile": 0.2}, "learner.top_entropy_quantile", 0.2),
        ({}, "learner.off_policy_correction", "none"),
        ({"rhymeflow": {"beta": 0.5, "schedule.name": "synchronous"}}, "learner.beta", 0.5),
    ],
)  # fmt: skip
def test_fields_become_ours(tmp_path, field, path, value):
    assert attrgetter(path)(made(tmp_path, **field).config) == value


@pytest.mark.parametrize(
    ("field", "part"),
    [
        ({"optim": "paged_adamw_8bit"}, "optim = 'paged_adamw_8bit' is not supported: .*AdamW"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type = 'polynomial' is not supported"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "it is min_lr or min_lr_rate, and with the"),
        (
            {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 2}},
            r"lr_scheduler_kwargs = \{'num_cycles': 2\}: with cosine_with_min_lr it is min_lr or",
        ),
        (
            {"use_vllm": True, "vllm_importance_sampling_mode": "token"},
            "vllm_importance_sampling_mode = 'token' is not supported; give one of token_truncate",
        ),
        ({"loss_type": "luspo"}, "'luspo' is not supported; give one of grpo, .*, cispo, sapo$"),
        ({"loss_type": "vespo"}, "GRPOConfig: loss_type = 'vespo' is not supported; give one"),
        ({"loss_type": "cispo"}, "epsilon_high = None: with loss_type cispo it is the greatest"),
        ({"report_to": "comet_ml"}, "report_to = 'comet_ml' is not supported"),
        ({"model_init_kwargs": {"revision": "a"}}, r"model_init_kwargs: revision"),
        ({"model_init_kwargs": "float32"}, "model_init_kwargs = 'float32', should be a mapping"),
        ({"model_init_kwargs": {"dtype": "float16"}}, r"'float16', should be bfloat16"),
        ({"data_seed": 3}, "data_seed is not supported"),
        ({"generation_kwargs": {"stop": "a", "min_p": 0.1}}, "generation_kwargs: min_p: not supp"),
        (
            {"generation_kwargs": {"stop": ""}, "rhymeflow": {"stop": [""]}},
            "should have at least 1",
        ),
        ({"metric_for_best_model": "loss"}, "metric_for_best_model = 'loss'"),
        ({"metric_for_best_model": "eval_reward", "greater_is_better": False}, "greater_is_better"),
        ({"rhymeflow": "{"}, "rhymeflow = '{' is no JSON"),
        ({"rhymeflow": ["x"]}, "rhymeflow is a list"),
        ({"rhymeflow": {"learner.beat": 1}}, "did you mean learner.beta"),
        ({"per_device_train_batch_size": 512}, "40 rows, fewer than the 64 prompts"),
        # Arguments of the trainer.
        ({"trainer": {"peft_config": object()}}, "peft_config is a object, should be peft's LoraC"),
        (
            {"trainer": {"peft_config": peft.LoraConfig()}},
            "target_modules = None: say 'all-linear'",
        ),
        (
            {"trainer": {"peft_config": peft.LoraConfig(target_modules=["q_proj"], use_dora=True)}},
            "peft_config.use_dora = True is not supported",
        ),
        ({"trainer": {"optimizers": (object(), None)}}, "optimizers is not supported"),
        ({"trainer": {"quantization_config": 1}}, "quantization_config is a int, should be tran"),
        ({"trainer": {"rollout_func": print}}, "rollout_func is not supported: environment"),
        ({"trainer": {"train_dataset": None}}, "train_dataset is needed"),
        (
            {"trainer": {"train_dataset": {"train": ROWS}}},
            "is a mapping of 'train': give one part",
        ),
        ({"trainer": {"train_dataset": [{"prompt": "a", "images": ["b"]}]}}, "column 'images': im"),
        ({"trainer": {"reward_funcs": None}}, "reward_funcs is needed, or an environment_factory"),
        ({"trainer": {"reward_funcs": []}}, "reward_funcs is needed, or an environment_factory"),
        ({"trainer": {"tokenizer": 3}}, "no argument tokenizer; did you mean processing_class"),
        ({"trainer": {"args": 3}}, "args is a int"),
        ({"eval_strategy": "epoch"}, "eval_strategy = 'epoch' needs an eval_dataset"),
        (
            {
                "trainer": {"eval_dataset": {"a": ROWS}},
                "load_best_model_at_end": True,
                "metric_for_best_model": "eval_reward",
                **dict.fromkeys(("eval_strategy", "save_strategy"), "epoch"),
            },
            "metric_for_best_model = 'eval_reward': with several eval sets, give eval_N",
        ),
        ({"trainer": {"formatting_func": 3}}, "takes no argument formatting_func"),
    ],
)
def test_what_would_be_another_run_is_refused(tmp_path, field, part, monkeypatch):
    assert re.search(part, refusal(made, tmp_path, **field))
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert "start it once, by python" in refusal(made, tmp_path)


TOLD = {"use_cpu", "vllm_mode", "max_tool_calling_iterations"}
"""Fields that turn on the machine or get a notice, of which other tests are."""
OTHERS: dict[str, Any] = {
    "loss_type": "grpo", "lr_scheduler_type": "cosine", "save_strategy": "no",
    "eval_strategy": "steps", "logging_strategy": "no", "optim": "adamw_8bit",
    "report_to": "wandb", "generation_kwargs": {"stop": "a"}, "scale_rewards": "batch",
    "model_init_kwargs": {"dtype": "float32"}, "lr_scheduler_kwargs": {"min_lr_rate": 0.5},
    "chat_template_kwargs": {"a": 1}, "reward_weights": [0.5], "vllm_mode": "server",
    "importance_sampling_level": "sequence", "reward_clip_range": (-3, 3),
    "multi_objective_aggregation": "normalize_then_sum", "metric_for_best_model": "x_reward",
    "vllm_importance_sampling_mode": "token_mask", "generation_batch_size": 16, "data_seed": 3,
    "vllm_gpu_memory_utilization": 0.5, "vllm_importance_sampling_clip_min": 0.5,
    "greater_is_better": False, "num_generations": 4, "per_device_train_batch_size": 16,
    "output_dir": "there", "run_name": "mine", "teacher_model_name_or_path": "b/teacher",
    "teacher_model_init_kwargs": {"dtype": "float32"}, "steps_per_generation": 2,
}  # fmt: skip
"""Of fields of which 8, 0.25 or another flag is none, a value that is not the default."""
NEEDED: dict[str, dict[str, Any]] = {
    "lr_scheduler_kwargs": {"lr_scheduler_type": "cosine_with_min_lr"},
    "project": {"report_to": "wandb"}, "eval_steps": {"eval_strategy": "steps"},
    "use_bias_correction_kl": {"beta": 0.1}, "sapo_temperature_pos": {"loss_type": "sapo"},
    "sapo_temperature_neg": {"loss_type": "sapo"},
}  # fmt: skip
"""Other fields without which one has no effect, which a notice says."""


def outcome(name: str, fields: dict[str, Any]) -> Any:
    """All that a trainer keeps of its configuration, or why there is none."""
    kind = next(each for each in TRAINERS if name in each.config_class.__dataclass_fields__)
    given = {"reward_funcs": fine, "eval_dataset": ROWS[:3]}
    if kind is DistillationTrainer:
        given = {} if "teacher_model_name_or_path" in fields else {"teacher_model": "a/teacher"}
    try:
        args = kind.config_class(**{"output_dir": "out", "use_cpu": True, **fields})
        found = kind("some/model", args=args, train_dataset=ROWS, **given)
    except (UserError, ValueError) as error:
        return str(error)
    return found.config, found.rhythm, found.hub, found.takes_best, found._pushes


TRAINERS: tuple[Any, ...] = GRPOTrainer, RLOOTrainer, DistillationTrainer


@pytest.mark.parametrize("name", sorted(set(by_name({**SAME, **MAPPED})) & set(HERE) - TOLD))
def test_every_field_that_is_mapped_changes_the_run_and_is_never_passed_over(name, capsys):
    needed = {"use_vllm": True} if name.startswith("vllm_") else NEEDED.get(name, {})
    usual = HERE[name]("out", use_cpu=True).__dict__[name]
    value = OTHERS.get(name, not usual if isinstance(usual, bool) else 8)
    without, alone = outcome(name, {}), outcome(name, {name: value})
    said = capsys.readouterr().out
    if alone == without:
        assert f"{name} = {value!r} has no effect with" in said
        without, alone = outcome(name, needed), outcome(name, {**needed, name: value})
    assert alone != without
    assert not isinstance(alone, str) or name in alone


def bits(**given):
    usual = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return BitsAndBytesConfig(**usual | {"bnb_4bit_compute_dtype": "bfloat16"} | given)


ADAPTED = {"peft_config": peft.LoraConfig(target_modules="all-linear")}


@pytest.mark.parametrize("where", ["trainer", "model_init_kwargs"])
def test_weights_of_4_bits_are_ours_where_they_are_equal(tmp_path, where, capsys):
    given = {"quantization_config": bits(bnb_4bit_quant_storage="bfloat16")}
    if where == "trainer":
        model = made(tmp_path, trainer=ADAPTED | given).config.model
    else:
        model = made(tmp_path, trainer=ADAPTED, model_init_kwargs=given).config.model
    assert (model.quantization, model.dtype, model.lora.rank) == ("nf4", "bfloat16", 8)
    assert "bnb_4bit_quant_storage = 'bfloat16' changes no value" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"load_in_4bit": False, "load_in_8bit": True}, "load_in_8bit = True is not supported"),
        ({"load_in_4bit": False}, "load_in_4bit = False is not supported, should be True"),
        ({"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type = 'fp4' .*should be 'nf4'"),
        ({"bnb_4bit_use_double_quant": True}, "bnb_4bit_use_double_quant = True is not"),
        ({"bnb_4bit_compute_dtype": "float16"}, "compute_dtype = 'float16', should be bfl"),
        ({"llm_int8_skip_modules": ["q_proj"]}, r"skip_modules = \['q_proj'\] is not"),
        ({"dtype": "float32"}, "compute_dtype = 'bfloat16' is not supported, should be 'float32'"),
        ({"twice": True}, "quantization_config is in args.model_init_kwargs too"),
        ({"peft_config": None}, "quantization has no effect without `lora`"),
    ],
)
def test_other_weights_of_few_bits_are_refused(tmp_path, given, part):
    dtype, twice = given.pop("dtype", None), given.pop("twice", False)
    trainer = ADAPTED | {k: given.pop(k) for k in ("peft_config",) if k in given}
    kwargs = {"dtype": dtype} | ({"quantization_config": bits()} if twice else {})
    trainer |= {"quantization_config": bits(**given)}
    found = refusal(made, tmp_path, trainer=trainer, model_init_kwargs=kwargs)
    assert re.search(part, found), found


def test_a_peft_config_becomes_an_adapter(tmp_path, capsys):
    shape = peft.LoraConfig(
        r=4, lora_alpha=12, use_rslora=True, target_modules=["v_proj", "q_proj"], lora_dropout=0.1,
        task_type="CAUSAL_LM", modules_to_save=["lm_head"],
    )  # fmt: skip
    assert made(tmp_path, trainer={"peft_config": shape}).config.model.lora == LoraConfig(
        rank=4, alpha=12, use_rslora=True, target_modules=("q_proj", "v_proj"),
        modules_to_save=("lm_head",),
    )  # fmt: skip
    assert "peft_config.lora_dropout = 0.1: there is no dropout" in capsys.readouterr().out
    assert made(tmp_path).config.model.lora == LoraConfig()


def rloo(tmp_path: Path, **fields: Any) -> RLOOTrainer:
    args = RLOOConfig(str(tmp_path / "out"), num_generations=4, use_cpu=True, **fields)
    return RLOOTrainer("some/model", fine, args, ROWS)


def taught(tmp_path: Path, teacher: Any = "some/teacher", **fields: Any) -> DistillationTrainer:
    args = DistillationConfig(str(tmp_path / "out"), use_cpu=True, **fields)
    return DistillationTrainer("some/model", teacher, args, ROWS)


def differing(config: Any) -> dict[str, Any]:
    """The learner's objective, as far as it is not that of a `GRPOTrainer` with TRL's defaults."""
    plain = {"advantage", "beta", "ratio", "epsilon", "epsilon_high", "loss_type", "kl_in"}
    plain |= {"kl_estimator", "scale_rewards", "reward_clip", "surrogate"}
    return config.learner.model_dump(include=plain)


def test_rloo_is_trls(tmp_path):
    config = rloo(tmp_path, reward_clip_range=(-5.0, 5.0), num_iterations=2).config
    assert differing(config) == {
        "advantage": "leave_one_out", "beta": 0.05, "ratio": "product", "epsilon": 0.2,
        "epsilon_high": None, "loss_type": "grpo", "kl_in": "reward", "kl_estimator": "k1",
        "scale_rewards": "none", "reward_clip": 5.0, "surrogate": "clip",
    }  # fmt: skip
    assert (config.learner.groups_per_batch, config.learner.num_iterations) == (2, 2)
    without = rloo(tmp_path, beta=0.0).config.learner
    assert (without.beta, without.kl_in, without.reward_clip) == (0.0, "loss", None)


def test_distillation_is_trls(tmp_path, capsys):
    trainer = taught(tmp_path, beta=0.5, gradient_accumulation_steps=3, temperature=0.7)
    config = trainer.config
    assert config.learner.distillation.model_dump(exclude_defaults=True) == {
        "teacher": "some/teacher", "mode": "full_logits", "jsd_beta": 0.5,
    }  # fmt: skip
    assert (config.learner.beta, config.reward.functions) == (0.0, ())
    assert (config.learner.groups_per_batch, config.rollout.num_generations) == (24, 1)
    assert (config.rollout.temperature, config.learner.num_minibatches) == (0.7, 1)
    assert "DistillationConfig(rhymeflow={'schedule.name'" in capsys.readouterr().out
    named = taught(tmp_path, None, teacher_model_name_or_path="other/teacher")
    assert named.config.learner.distillation.teacher == "other/teacher"


def test_a_teacher_may_be_an_object(tmp_path):
    teacher = AutoModelForCausalLM.from_pretrained(recipes.directory("demo"))
    trainer = taught(tmp_path, teacher)
    folder = trainer.config.learner.distillation.teacher
    assert folder == str(tmp_path / "out" / "inputs" / "teacher")
    trainer._inputs.write()
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= set(os.listdir(folder))
    trainer._inputs.write(begun=True)
    with torch.no_grad():
        next(teacher.parameters())[0, 0] += 1.0
    said = refusal(trainer._inputs.write, begun=True)
    assert f"{folder} has other weights than the teacher that is given; a run resumes with" in said


@pytest.mark.parametrize(
    ("make", "fields", "part"),
    [
        (rloo, {"reward_clip_range": (0.0, 5.0)}, r"RLOOConfig: reward_clip_range = \[0.0, 5.0\]"),
        (rloo, {"normalize_advantages": True}, "RLOOConfig: normalize_advantages = True is not"),
        (taught, {"teacher": None}, "DistillationTrainer: teacher_model is needed"),
        (taught, {"teacher_model_revision": "v2"}, "teacher_model_revision = 'v2' is not supp"),
        (taught, {"teacher_model_init_kwargs": {"dtype": "bfloat16"}},
         r"DistillationConfig: teacher_model_init_kwargs\['dtype'\] = 'bfloat16' is not supported"),
        (taught, {"teacher_model_init_kwargs": {"quantization_config": 4}},
         "teacher_model_init_kwargs: quantization_config: not supported"),
        (taught, {"eval_strategy": "steps", "eval_steps": 5}, "eval_strategy = 'steps' is not sup"),
        (taught, {"top_p": 0.9}, "learner.distillation: rollout.top_k and top_p"),
    ],
)  # fmt: skip
def test_what_would_be_another_objective_is_refused(tmp_path, make, fields, part):
    assert re.search(part, refusal(make, tmp_path, **fields))
    other = refusal(RLOOTrainer, "some/model", fine, GRPOConfig(str(tmp_path)), ROWS)
    assert other.startswith("RLOOConfig: args is a GRPOConfig, should be a RLOOConfig")


def test_a_name_is_that_of_a_reward_model(tmp_path):
    trainer = made(tmp_path, {"reward_funcs": ["org/judge", fine]}, reward_weights=[2.0, 0.5])
    first, second = trainer.config.reward.functions
    assert (first.function, first.options, first.weight) == (
        "reward_model", {"model": "org/judge"}, 2.0,
    )  # fmt: skip
    assert (first.per, second.weight) == ("group", 0.5)


def test_tools_have_as_many_turns_as_trl_gives(tmp_path, capsys):
    def add(a: int) -> int:
        return a

    trainer = made(tmp_path, {"tools": [add]}, max_tool_calling_iterations=3)
    assert trainer.config.environment.max_turns == 4
    assert trainer.config.environment.tools[0].endswith("objects.pickle:add")
    assert made(tmp_path, {"tools": [add]}).config.environment.max_turns > 1000
    made(tmp_path, max_tool_calling_iterations=3)
    assert "max_tool_calling_iterations has no effect without tools" in capsys.readouterr().out


def test_environments_that_functions_are_handed_judge_themselves(tmp_path):
    class Game:
        def reset(self, **columns: Any) -> None: ...

        def move(self, to: str) -> str:
            return to

    def score(environments: list[Game], **columns: Any) -> list[float]:
        return [1.0 for _ in environments]

    given = {"environment_factory": Game, "reward_funcs": [score, fine]}
    config = made(tmp_path, given, reward_weights=[0.5, 2.0]).config
    (kind,) = config.environment.classes
    assert (kind.name, kind.reward_name) == ("score", "score")
    assert [each.weight for each in config.reward.functions] == [2.0]
    unweighted = made(tmp_path, given, reward_weights=[0.0, 2.0])
    (judged,) = unweighted._inputs.by_value.values()
    game = judged()
    game.reset()
    assert asyncio.run(game.get_reward()) == 0.0
    several = made(tmp_path, {"environment_factory": {"a": Game, "b": Game}, "reward_funcs": None})
    assert [each.name for each in several.config.environment.classes] == ["a", "b"]


def test_what_is_otherwise_than_in_trl_is_printed(tmp_path, capsys):
    made(tmp_path, {"reward_funcs": lambda completions, **columns: [1.0]}, torch_compile=True)
    printed = capsys.readouterr().out
    assert "torch_compile = True has no effect" in printed
    assert "training is asynchronous: responses may be 1 version old" in printed
    assert "lambda: carried by value" in printed
    made(tmp_path, rhymeflow={"schedule.name": "synchronous"})
    assert capsys.readouterr().out == ""


def test_a_second_run_of_a_script_goes_beside_the_first(tmp_path):
    (tmp_path / "out" / "inputs").mkdir(parents=True)
    (tmp_path / "out" / "events.db").touch()
    trainer = made(tmp_path)
    assert trainer.holds_a_run
    assert not list((tmp_path / "out" / "inputs").iterdir()), "what the first began with stays"
    trainer._choose_run_dir(resumes=False)
    assert trainer.run_dir == tmp_path / "out-2"
    assert trainer.config.run.output_dir == str(tmp_path / "out-2")
    assert Path(trainer.config.data.source) == tmp_path / "out-2" / "inputs" / "train.jsonl"
    trainer._inputs.write()
    lines = Path(trainer.config.data.source).read_text().splitlines()
    assert [json.loads(line) for line in lines] == ROWS
    (tmp_path / "out-2" / "events.db").touch()
    late = made(tmp_path)
    late._choose_run_dir(resumes=True)
    assert late.run_dir == tmp_path / "out-2"


def test_a_run_goes_on_with_its_own_rows_only(tmp_path):
    first = made(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "events.db").touch()
    first._begin(first.run_dir)
    second = made(tmp_path, {"train_dataset": ROWS[1:]})
    message = refusal(second._begin_resumed, second.run_dir)
    assert "other rows than the dataset that is given" in message
    elsewhere = str(tmp_path / "other" / "checkpoint-3")
    assert "is not in the run directory" in refusal(first.train, resume_from_checkpoint=elsewhere)
    older, newest = (first.run_dir / "checkpoints" / name for name in ("step-2", "step-10"))
    for each in (older, newest):
        each.mkdir(parents=True)
    said = refusal(first.train, resume_from_checkpoint=str(older))
    assert "the run goes on from its end, after step-10; to go back, begin a new run" in said
    assert "after step-10" not in refusal(first.train, resume_from_checkpoint=str(newest))


def test_what_trl_would_call_and_a_run_does_not_is_refused(tmp_path, capsys):
    class Mine(GRPOTrainer):
        def compute_loss(self, *_: Any) -> None: ...

    args = GRPOConfig(str(tmp_path / "out"))
    said = refusal(Mine, "some/model", fine, args, ROWS)
    assert "Mine overrides compute_loss, which would never be called" in said

    class Fine(GRPOTrainer):
        def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
            return {}

        def of_mine(self) -> None: ...

    Fine("some/model", fine, args, ROWS)
    assert "rhymeflow: Fine.evaluate is not called while training\n" in capsys.readouterr().out


def test_other_names_of_a_script_are_trls():
    for name in ("ModelConfig", "ScriptArguments", "TrlParser", "get_peft_config", "get_dataset"):
        assert getattr(rhymeflow.trl, name) is getattr(trl, name)
    assert rewards.think_format_reward is trl.rewards.think_format_reward
    assert not hasattr(rhymeflow.trl, "no_such_name")
    for name, said in (
        ("DPOTrainer", "trains by .*GRPOTrainer.*; what does not train with them needs `from trl"),
        ("SFTConfig", "has no SFTConfig: .*`rhymeflow sft` fine-tunes"),
        ("experimental", "has no experimental: it trains by"),
        ("get_kbit_device_map", "nor has TRL any more: leave device_map out"),
    ):
        with pytest.raises(ImportError, match=said):
            exec(f"from rhymeflow.trl import {name}")
