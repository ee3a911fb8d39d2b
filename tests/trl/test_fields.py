"""The table of TRL's fields: complete, and what each fate does."""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path
from typing import Any

import pytest

from rhymeflow import Trainer
from rhymeflow.config.fields import field_paths
from rhymeflow.errors import UserError
from rhymeflow.trl.config import GRPOConfig
from rhymeflow.trl.fields import FIELDS, markdown
from rhymeflow.trl.given import Given
from rhymeflow.trl.removed_fields import REMOVED
from rhymeflow.trl.translate import run_fields, steps_in

DOCS = Path(__file__).parents[2] / "docs"

NUM_FIELDS = 191
"""Of TRL 1.16 with transformers 5.23."""


def test_every_field_has_one_fate_and_a_sentence() -> None:
    assert len(FIELDS) == NUM_FIELDS
    assert all(each.what for each in FIELDS.values())
    assert not set(REMOVED) & set(FIELDS)


@pytest.mark.slow
def test_names_order_and_defaults_are_those_of_trl() -> None:
    trl = pytest.importorskip("trl")
    theirs = dataclasses.fields(trl.GRPOConfig)
    assert [each.name for each in theirs] == list(FIELDS)
    for each in theirs:
        default = each.default if each.default is not dataclasses.MISSING else []
        default = default.value if isinstance(default, enum.Enum) else default
        assert default == FIELDS[each.name].default, each.name


@pytest.mark.slow
def test_an_object_of_trls_own_class_says_the_same(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    given = {"output_dir": str(tmp_path), "max_steps": 3, "steps_per_generation": 4, "top_k": 7}
    theirs = Given(trl.GRPOConfig(**given, use_cpu=True, report_to="none"))
    ours = Given(GRPOConfig(**given, use_cpu=True))
    assert theirs.notices == ours.notices == []
    made_by_trl = {name for name in FIELDS if theirs[name] != ours[name]}
    assert made_by_trl <= {
        "bf16", "pad_to_multiple_of", "report_to", "disable_tqdm", "activation_checkpointing",
        "accelerator_config", "dataloader_pin_memory", "debug",
    }  # fmt: skip
    steps = steps_in(ours)
    assert steps_in(theirs) == steps
    fields = [run_fields(each, steps, 3, 40) for each in (theirs, ours)]
    assert fields[0] == fields[1]
    with pytest.raises(UserError, match="loss_type"):
        Trainer(
            config=run_fields(Given(trl.GRPOConfig(loss_type="sapo", use_cpu=True)), steps, 3, 40)
        )


def test_what_fields_set_is_there() -> None:
    paths = set(field_paths())
    for field in FIELDS.values():
        named = field.what.split(", ") if field.fate == "mapped" else []
        for path in named:
            section = path.partition(".")[0]
            if section in ("learner", "run", "rollout", "data", "model") and " " not in path:
                assert path in paths, field.name


def test_the_page_shows_the_table() -> None:
    assert markdown() in (DOCS / "from-trl.md").read_text(encoding="utf-8")


def test_it_is_a_dataclass_that_parsers_take() -> None:
    from transformers import HfArgumentParser

    parser = HfArgumentParser(GRPOConfig)
    line = [
        "--output_dir", "out", "--num_generations", "4", "--bf16", "true",
        "--learning_rate", "1e-5",
        "--model_init_kwargs", '{"dtype": "float32"}', "--report_to", "wandb",
        "--rhymeflow", '{"schedule.name": "synchronous"}',
    ]  # fmt: skip
    (args,) = parser.parse_args_into_dataclasses(line)
    given = Given(args)
    assert (given["num_generations"], given["bf16"], given["learning_rate"]) == (4, True, 1e-5)
    assert given["model_init_kwargs"] == {"dtype": "float32"}
    assert given.extra == {"schedule.name": "synchronous"}
    assert isinstance(args, GRPOConfig)


def test_arguments_may_be_positional_and_changed_later() -> None:
    args = GRPOConfig("out", 4, 1.0, 7)
    args.chat_template_kwargs = {"enable_thinking": False}
    given = Given(args)
    assert (given["output_dir"], given["max_steps"]) == ("out", 7)
    assert given["chat_template_kwargs"] == {"enable_thinking": False}
    assert args.to_dict()["per_device_train_batch_size"] == 4


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"learning_rte": 1}, "no field 'learning_rte'; did you mean learning_rate"),
        ({"max_prompt_length": 9}, "max_prompt_length: TRL has no such field any more; give"),
        ({"warmup_ratio": 0.1}, "warmup_steps takes a share below 1"),
        ({"zzz": 1}, "no field 'zzz'$"),
    ],
)
def test_a_name_that_is_no_field_is_said(given: dict[str, Any], part: str) -> None:
    with pytest.raises(UserError, match=part):
        GRPOConfig(**given)


def test_a_field_given_twice_is_said() -> None:
    with pytest.raises(UserError, match="output_dir is given twice"):
        GRPOConfig("out", output_dir="out")


@pytest.mark.parametrize("name", [each.name for each in FIELDS.values() if each.fate == "refused"])
def test_what_is_refused_says_what_to_do(name: str) -> None:
    value = object() if not isinstance(FIELDS[name].default, str) else "other"
    with pytest.raises(UserError) as error:
        Given(GRPOConfig(**{name: value}))
    assert str(error.value).startswith(f"GRPOConfig: {name} = ")
    assert str(error.value).endswith(FIELDS[name].what)


def test_what_means_the_default_is_not_refused() -> None:
    Given(GRPOConfig(min_p=0.0, fsdp="", greater_is_better=True, train_sampling_strategy="random"))
    with pytest.raises(UserError, match=r"min_p = 0\.05"):
        Given(GRPOConfig(min_p=0.05))
    with pytest.raises(UserError, match="entropy_coef = True"):  # a flag is no number
        Given(GRPOConfig(entropy_coef=True))


def test_what_is_passed_over_is_said_where_it_is_given() -> None:
    assert Given(GRPOConfig(tf32=None, log_completions=True)).notices == []
    (notice,) = Given(GRPOConfig(torch_compile=True)).notices
    assert notice.startswith("torch_compile = True has no effect: ")


def test_a_field_of_a_later_trl_is_refused_by_name() -> None:
    made = dataclasses.make_dataclass(
        "GRPOConfig", [("per_device_train_batch_size", int, 8), ("new_trick", bool, False)]
    )
    assert Given(made()).values["num_generations"] == 8
    with pytest.raises(UserError, match="new_trick = True: this version of Rhymeflow"):
        Given(made(new_trick=True))


@pytest.mark.parametrize("args", [{"max_steps": 1}, 3, object()])
def test_what_is_no_configuration_is_said(args: Any) -> None:
    with pytest.raises(UserError, match="should be a GRPOConfig"):
        Given(args)
