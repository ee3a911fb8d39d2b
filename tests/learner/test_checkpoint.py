"""Checkpoints: what is in one, what goes on from it, damaged ones, full disks."""

import json
import threading
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from torch.distributed.checkpoint import FileSystemWriter
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from rhymeflow.errors import UserError
from rhymeflow.learner.checkpoint import Saved, Saver
from rhymeflow.learner.learner import Learner
from rhymeflow.store.checkpoint_dirs import CheckpointDir, CheckpointPlace
from tests.learner.builders import (
    learner_config,
    made_up_batch,
    rollout_config,
    tiny_learner,
    tiny_model,
)


def trained(learner: Learner, *steps: int) -> list[dict]:
    rows = [learner.train(made_up_batch(seed=step), step) for step in steps]
    return [{name: value for name, value in row.items() if name != "step_time"} for row in rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_transformers_loads_it(tmp_path, dtype):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")), eos_token="b"
    )
    model = tiny_model()
    model.generation_config.eos_token_id = [5, 7]
    model.generation_config.do_sample = False
    model.generation_config.temperature = 0.6  # which transformers would not save
    model.register_buffer("bias", torch.arange(3.0))
    learner = Learner(model, tokenizer, learner_config(), rollout_config(), dtype)
    learner.train(made_up_batch(), 0)
    learner.snapshot().write(CheckpointDir(tmp_path / "step-1"))
    config = json.loads((tmp_path / "step-1" / "config.json").read_text())
    assert "rhymeflow" not in json.dumps(config)
    assert len(list((tmp_path / "step-1").glob("*.safetensors"))) == 1
    model, found = AutoModelForCausalLM.from_pretrained(
        tmp_path / "step-1", output_loading_info=True
    )
    assert found["unexpected_keys"] == {"bias"}
    assert not found["missing_keys"]
    assert model.dtype == dtype
    assert model.config._attn_implementation == "sdpa"
    published = dict(learner.rows())
    assert torch.equal(published.pop("bias"), torch.arange(3.0))
    for name, weight in published.items():
        assert torch.equal(weight, model.get_parameter(name))
    assert AutoTokenizer.from_pretrained(tmp_path / "step-1").convert_tokens_to_ids("b") == 1
    # `generate` ends where the run did: by the model, its configuration and the tokenizer.
    ends = {*([config["eos_token_id"]] if config["eos_token_id"] is not None else []), 1, 5, 7}
    assert set(model.generation_config.eos_token_id) == ends


def test_saving_twice_replaces_and_leaves_nothing_unfinished(tmp_path):
    learner = tiny_learner()
    learner.snapshot().write(CheckpointDir(tmp_path / "step-0"))
    trained(learner, 0)
    learner.snapshot().write(CheckpointDir(tmp_path / "step-0"))
    assert [path.name for path in tmp_path.iterdir()] == ["step-0"]
    assert tiny_learner().restore(CheckpointDir(tmp_path / "step-0")) == 1


def cut_short(learner: Path) -> None:
    (path,) = learner.glob("*.distcp")
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut_short, r"step-1: cannot be read"),
        (lambda learner: (learner / ".metadata").write_bytes(b"x"), r"step-1: cannot be read"),
        (lambda learner: (learner / ".metadata").unlink(), r"step-1: cannot be read"),
        (lambda learner: (learner / "progress.json").write_text("{"), r"step-1: cannot be read"),
        (lambda learner: (learner / "progress.json").unlink(), r"no checkpoint .*progress\.json"),
    ],
)
def test_a_damaged_one_is_a_clear_error_and_changes_nothing(tmp_path, damage, said):
    learner, other = tiny_learner(), tiny_learner()
    trained(learner, 0)
    learner.snapshot().write(CheckpointDir(tmp_path / "step-1"))
    damage(tmp_path / "step-1" / "learner")
    with pytest.raises(UserError, match=said) as error:
        other.restore(CheckpointDir(tmp_path / "step-1"))
    assert "\n" not in str(error.value)
    assert other.version == 0
    assert other.checksum() == tiny_learner().checksum()


# -- written in the background ---------------------------------------------------------------------


def wait_for(saver: Saver, count: int) -> list[Saved]:
    found, deadline = [], time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < deadline
        found += saver.ended()
        time.sleep(0.01)
    assert not saver.is_busy
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_the_version_that_was_copied(tmp_path, monkeypatch, dtype):
    options = {
        "beta": 0.1,
        "num_iterations": 2,
        "lr_scheduler_type": "linear",
        "frozen_parameters": ["*norm*"],
        "gradient_checkpointing": True,
    }
    learner, restored = (tiny_learner(dtype=dtype, **options) for _ in "12")
    saver, may_write, write = (
        Saver(CheckpointPlace(tmp_path)),
        threading.Event(),
        FileSystemWriter.write_data,
    )
    monkeypatch.setattr(
        FileSystemWriter, "write_data", lambda *args: (may_write.wait(60), write(*args))[1]
    )
    trained(learner, 0)
    checksum = learner.checksum()
    saver.begin(1, learner.snapshot(), keep=())
    after = trained(learner, 1)  # while it is written
    assert saver.is_busy
    assert not (tmp_path / "step-1").exists(), "half a checkpoint has its final name"
    may_write.set()
    assert wait_for(saver, 1) == [Saved(1, str(tmp_path / "step-1"), None)]
    assert restored.restore(CheckpointDir(tmp_path / "step-1")) == 1
    assert restored.checksum() == checksum
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "step-1")
    assert all(torch.equal(w, plain.get_parameter(n)) for n, w in restored.rows().items())
    assert trained(restored, 1) == after
    assert restored.checksum() == learner.checksum() != checksum


def test_others_are_deleted_when_it_is_complete(tmp_path):
    learner, saver = tiny_learner(), Saver(CheckpointPlace(tmp_path))
    for version in (1, 2, 3):
        saver.begin(version, learner.snapshot(), keep=(1,))
    wait_for(saver, 3)
    (tmp_path / "step-9.unfinished").mkdir()  # of a writer that was killed
    saver.begin(4, learner.snapshot(), keep=(1, 3))
    wait_for(saver, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", "step-3", "step-4"}


@pytest.mark.parametrize("error_type", [OSError, RuntimeError])  # torch's writer has its own
def test_a_disk_that_is_full_costs_no_earlier_checkpoint(tmp_path, monkeypatch, error_type):
    learner, saver = tiny_learner(), Saver(CheckpointPlace(tmp_path))
    saver.begin(1, learner.snapshot(), keep=())

    def fail(*args):
        raise error_type(28, "No space left on device")

    wait_for(saver, 1)
    monkeypatch.setattr(FileSystemWriter, "write_data", fail)
    saver.begin(2, learner.snapshot(), keep=())
    ((version, path, error),) = wait_for(saver, 1)
    assert (version, path) == (2, str(tmp_path / "step-2"))
    assert "No space left" in error
    assert [each.name for each in tmp_path.iterdir()] == ["step-1"], "the rest takes no room"
    assert tiny_learner().restore(CheckpointDir(tmp_path / "step-1")) == 0
