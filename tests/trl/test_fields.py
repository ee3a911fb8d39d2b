"""The table of TRL's fields: complete, and what becomes of a field of each part."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import trl

from rhymeflow.config.fields import field_paths
from rhymeflow.trl import DistillationConfig, GRPOConfig, RLOOConfig
from rhymeflow.trl.fields import MAPPED, PASSED_OVER, REFUSED, SAME, by_name, own_fields, values_of
from tests.refused import refusal

PAGE = Path(__file__).parents[2] / "docs" / "from-trl.md"
KINDS = trl.GRPOConfig, trl.RLOOConfig, trl.DistillationConfig
HERE = {each.name: kind for kind in KINDS[::-1] for each in dataclasses.fields(kind)}
"""By field, the first of TRL's configurations that has it."""


def test_every_field_of_trl_has_one_place_in_the_table_which_the_page_shows():
    parts = (SAME, MAPPED, PASSED_OVER, REFUSED)
    known = [each for part in parts for each in by_name(part)]
    assert len(known) == len(set(known))
    since_5_20 = {f"activation_checkpointing{of}" for of in ("", "_kwargs")}
    assert set(known) - set(HERE) in (set(), since_5_20)
    assert set(known) >= set(HERE)
    page = PAGE.read_text(encoding="utf-8")
    for part in parts:
        fields = {text: ", ".join(f"`{n}`" for n in given.split()) for text, given in part.items()}
        assert "\n".join(f"| {names} | {text} |" for text, names in fields.items()) in page


def test_what_fields_set_is_there():
    named = [f"{section}.{name}" for name, section in by_name(SAME).items()]
    named += [path for text in MAPPED for path in text.replace(";", ",").split(", ")]
    sections = ("learner.", "run.", "rollout.", "data.", "model.")
    paths = [each for each in named if each.startswith(sections) and " " not in each]
    assert len(paths) > 30
    assert set(paths) <= set(field_paths())


def test_it_is_trls_own_parsers_take_it_and_it_may_be_changed_later():
    from transformers import HfArgumentParser

    line = [
        "--output_dir", "out", "--num_generations", "4", "--bf16", "true", "--use_cpu", "true",
        "--learning_rate", "1e-5",
        "--model_init_kwargs", '{"dtype": "float32"}', "--report_to", "wandb",
        "--rhymeflow", '{"schedule.name": "synchronous"}',
    ]  # fmt: skip
    (args,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(line)
    assert isinstance(args, trl.GRPOConfig)
    values, notices = values_of(args)
    assert (values["num_generations"], values["bf16"], values["learning_rate"]) == (4, True, 1e-5)
    assert values["model_init_kwargs"] == {"dtype": "float32"}
    assert own_fields(args) == {"schedule.name": "synchronous"}
    assert notices == []
    args = GRPOConfig("out", 8, 1.0, 7)
    args.chat_template_kwargs = {"enable_thinking": False}
    values, _ = values_of(args)
    assert (values["output_dir"], values["max_steps"]) == ("out", 7)
    assert values["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"learning_rte": 1}, "there is no field 'learning_rte'; did you mean learning_rate"),
        ({"max_prompt_length": 9}, "max_prompt_length: TRL has no such field any more; give"),
        ({"warmup_ratio": 0.1}, "warmup_steps takes a share below 1"),
        ({"overwrite_output_dir": True}, "leave it out; a second run goes to output_dir-2"),
        ({"zzz": 1}, "no field 'zzz'$"),
        ({"num_generations": 3}, "must be divisible by num_generations"),
        ({"eval_strategy": "best"}, "best is not a valid IntervalStrategy"),
        ({"steps_per_generation": 2, "generation_batch_size": 8}, "can not be both configured"),
    ],
)
def test_what_is_no_field_and_what_trl_refuses_is_one_line(given, part):
    assert re.search(f"^GRPOConfig: .*{part}", refusal(GRPOConfig, **given))


def changed(name: str, value: Any) -> tuple[Any, type]:
    kind = HERE.get(name, trl.GRPOConfig)
    args = kind("out", use_cpu=True)
    setattr(args, name, value)
    return args, kind


@pytest.mark.parametrize("name", by_name(REFUSED))
def test_what_is_refused_says_what_to_do(name):
    args, kind = changed(name, "other")
    message, instead = refusal(values_of, args, kind), by_name(REFUSED)[name]
    assert message == f"{kind.__name__}: {name} = 'other' is not supported: {instead}"


@pytest.mark.parametrize("name", [name for name in by_name(PASSED_OVER) if name in HERE])
def test_what_is_passed_over_is_said_where_it_is_given(name):
    _, notices = values_of(*changed(name, "other"))
    assert notices == [f"{name} = 'other' has no effect: {by_name(PASSED_OVER)[name]}"]


def test_what_means_the_default_needs_no_word():
    same = {"min_p": 0.0, "fsdp": "", "train_sampling_strategy": "random", "tf32": None}
    args = GRPOConfig("out", log_completions=True, **same)
    assert values_of(args)[1] == []
    args.router_aux_loss_coef = True  # a flag is no number
    assert "router_aux_loss_coef = True" in refusal(values_of, args)


def test_a_field_that_transformers_has_under_two_names_gets_one_notice():
    args = GRPOConfig("out", gradient_checkpointing_kwargs={"use_reentrant": False})
    (notice,) = values_of(args)[1]
    assert "checkpointing_kwargs = {'use_reentrant': False} has no effect" in notice


@dataclasses.dataclass
class Own(GRPOConfig):
    system_prompt: str = ""
    min_p: float | None = 0.1


def test_fields_of_a_scripts_own_are_left_to_it_but_not_other_defaults_of_trls():
    args = Own("out", system_prompt="Add up.", min_p=None)
    assert values_of(args)[1] == []
    assert args.use_cpu  # or TRL would refuse a machine without a GPU
    assert "min_p = 0.1 is not supported" in refusal(values_of, Own("out"))
    assert "must be divisible" in refusal(Own, "out", num_generations=3)


def test_what_becomes_of_a_vllm_server_and_of_fields_that_only_vllm_reads():
    server = {"vllm_mode": "server", "vllm_server_port": 80}
    _, (port, mode) = values_of(GRPOConfig("out", use_vllm=True, **server))
    assert port.startswith("vllm_server_port = 80 has no effect: a run places and starts")
    assert mode.startswith("vllm_mode = 'server': no server is asked, stop yours; the run starts")
    unread = {"vllm_mode": "server", "vllm_gpu_memory_utilization": 0.9}
    notices = [
        f"{name} = {value!r} has no effect without use_vllm" for name, value in unread.items()
    ]
    assert values_of(GRPOConfig("out", **unread))[1] == notices
    other = GRPOConfig("out", use_vllm=True, vllm_mode="remote")
    assert refusal(values_of, other).endswith("vllm_mode = 'remote': colocate or server")


@pytest.mark.parametrize(
    ("others", "unread", "why"),
    [
        ({"loss_type": "sapo"}, "epsilon epsilon_high delta", "with loss_type sapo"),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "epsilon delta", "with loss_type cispo"),
        ({"lr_scheduler_type": "constant"}, "warmup_steps", "with a constant schedule"),
        ({"logging_strategy": "no"}, "logging_steps", "without logging_strategy steps"),
        ({"save_strategy": "epoch"}, "save_steps", "without save_strategy steps"),
        ({"report_to": "tensorboard"}, "project", "without a tracker that has projects"),
    ],
)
def test_what_other_fields_leave_without_effect_is_said_and_passed_over(others, unread, why):
    names, usual = unread.split(), GRPOConfig("out")
    values, notices = values_of(GRPOConfig("out", **others, **dict.fromkeys(names, 3)))
    assert sorted(notices) == sorted(f"{name} = 3 has no effect {why}" for name in names)
    assert all(values[name] == getattr(usual, name) for name in names)


def test_a_field_that_the_table_does_not_have_is_refused_by_name():
    later = dataclasses.make_dataclass(
        "GRPOConfig", [("new_trick", bool, False)], bases=(trl.GRPOConfig,)
    )
    assert values_of(later("out", use_cpu=True), later)[0]["num_generations"] == 8
    unknown = later("out", use_cpu=True, new_trick=True)
    assert "new_trick = True is not known to this version" in refusal(values_of, unknown, later)


@pytest.mark.parametrize("kind", [GRPOConfig, RLOOConfig, DistillationConfig])
def test_each_is_trls_own_with_its_defaults_and_one_field_more(kind):
    (of_trl,) = (each for each in KINDS if issubclass(kind, each))
    plain, ours = of_trl("out", use_cpu=True), kind("out", use_cpu=True)
    extra = {each.name for each in dataclasses.fields(ours)} - {*plain.__dict__}
    assert extra == {"rhymeflow"}
    values, notices = values_of(ours, of_trl)
    assert values == values_of(plain, of_trl)[0]
    assert notices == []
    title = of_trl.__name__
    assert refusal(kind, num_generation=2).startswith(f"{title}: there is no field 'num_generation")
    ours.rhymeflow = "{"
    assert refusal(own_fields, ours).startswith(f"{title}: rhymeflow = '{{' is no JSON")
    assert refusal(values_of, ours, dict).startswith("dict: args is a ")
