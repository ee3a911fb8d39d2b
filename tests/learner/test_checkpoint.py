import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from rhymeflow.errors import UserError
from rhymeflow.learner.single import Learner
from tests.learner.builders import (
    learner_config,
    made_up_batch,
    rollout_config,
    tiny_learner,
    tiny_model,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restored_learner_continues_identically(tmp_path: Path, dtype: torch.dtype):
    batches = [made_up_batch(seed=n) for n in range(4)]
    changes = {"beta": 0.1, "num_iterations": 2, "lr_scheduler_type": "linear"}
    straight = tiny_learner(dtype=dtype, **changes)
    metrics = [straight.train(batch, step) for step, batch in enumerate(batches)]

    stopped = tiny_learner(dtype=dtype, **changes)
    for step in (0, 1):
        stopped.train(batches[step], step)
    stopped.save(tmp_path / "step-2")
    resumed = tiny_learner(dtype=dtype, **changes)
    assert resumed.restore(tmp_path / "step-2") == 2
    for step in (2, 3):
        again = resumed.train(batches[step], step)
        del again["step_time"], metrics[step]["step_time"]
        assert again == metrics[step]
    for name, weight in straight.weights().items():
        assert torch.equal(weight, resumed.weights()[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_transformers_loads_it(tmp_path: Path, dtype: torch.dtype):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")), eos_token="b"
    )
    model = tiny_model()
    model.generation_config.eos_token_id = [5, 7]
    model.generation_config.do_sample = False
    model.generation_config.temperature = 0.6  # which transformers would not save
    learner = Learner(model, tokenizer, learner_config(), rollout_config(), dtype)
    learner.train(made_up_batch(), 0)
    learner.save(tmp_path / "step-1")
    config = json.loads((tmp_path / "step-1" / "config.json").read_text())
    assert "rhymeflow" not in json.dumps(config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "step-1")
    assert model.dtype == dtype
    assert model.config._attn_implementation == "sdpa"
    for name, weight in learner.weights().items():
        assert torch.equal(weight, model.get_parameter(name))
    assert AutoTokenizer.from_pretrained(tmp_path / "step-1").convert_tokens_to_ids("b") == 1
    # `generate` ends where the run did: by the model, its configuration and the tokenizer.
    ends = {*([config["eos_token_id"]] if config["eos_token_id"] is not None else []), 1, 5, 7}
    assert set(model.generation_config.eos_token_id) == ends


def test_saving_twice_replaces_and_leaves_nothing_unfinished(tmp_path: Path):
    learner = tiny_learner()
    learner.save(tmp_path / "step-0")
    learner.train(made_up_batch(), 0)
    learner.save(tmp_path / "step-0")
    assert [path.name for path in tmp_path.iterdir()] == ["step-0"]
    assert tiny_learner().restore(tmp_path / "step-0") == 1


def test_no_checkpoint_is_a_clear_error(tmp_path: Path):
    with pytest.raises(UserError, match=r"no checkpoint to resume from \(learner.pt is missing\)"):
        tiny_learner().restore(tmp_path)


def test_one_that_is_cut_short_is_a_clear_error_and_changes_nothing(tmp_path: Path):
    learner = tiny_learner()
    learner.train(made_up_batch(), 0)
    learner.save(tmp_path / "step-1")
    path = tmp_path / "step-1" / "learner.pt"
    path.write_bytes(path.read_bytes()[:-1000])
    other = tiny_learner()
    before = {name: each.clone() for name, each in other.weights().items()}
    with pytest.raises(UserError, match=r"step-1/learner.pt: cannot be read") as error:
        other.restore(tmp_path / "step-1")
    assert "\n" not in str(error.value)
    assert other.version == 0
    assert all(torch.equal(each, before[name]) for name, each in other.weights().items())
