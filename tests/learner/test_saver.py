"""Checkpoints written in the background."""

import threading
import time
from pathlib import Path

import pytest
import torch

from rhymeflow.learner import checkpoint
from rhymeflow.learner.saver import Saved, Saver
from tests.learner.builders import made_up_batch, tiny_learner


def wait_for(saver: Saver, count: int) -> list[Saved]:
    found, deadline = [], time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < deadline
        found += saver.ended()
        time.sleep(0.01)
    assert not saver.is_busy
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_the_version_that_was_copied(tmp_path: Path, monkeypatch, dtype):
    learner, saver = tiny_learner(dtype=dtype, beta=0.1), Saver(tmp_path)
    learner.train(made_up_batch(seed=0), 0)
    expected = {name: weight.clone() for name, weight in learner.weights().items()}
    may_write = threading.Event()
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda *args: (may_write.wait(60), save(*args)))
    saver.begin(1, learner.snapshot(), keep=())
    after = learner.train(made_up_batch(seed=1), 1)  # while it is written
    assert saver.is_busy
    assert not (tmp_path / "step-1").exists(), "half a checkpoint has its final name"
    may_write.set()
    assert wait_for(saver, 1) == [Saved(1, tmp_path / "step-1", None)]
    restored = tiny_learner(dtype=dtype, beta=0.1)
    assert restored.restore(tmp_path / "step-1") == 1
    assert all(torch.equal(weight, expected[name]) for name, weight in restored.weights().items())
    again = restored.train(made_up_batch(seed=1), 1)
    del again["step_time"], after["step_time"]
    assert again == after


def test_others_are_deleted_when_it_is_complete(tmp_path: Path):
    learner, saver = tiny_learner(), Saver(tmp_path)
    for version in (1, 2, 3):
        saver.begin(version, learner.snapshot(), keep=(1,))
    wait_for(saver, 3)
    (tmp_path / "step-9.unfinished").mkdir()  # of a writer that was killed
    saver.begin(4, learner.snapshot(), keep=(1, 3))
    wait_for(saver, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", "step-3", "step-4"}


@pytest.mark.parametrize("error_type", [OSError, RuntimeError])  # torch's writer has its own
def test_a_disk_that_is_full_costs_no_earlier_checkpoint(tmp_path: Path, monkeypatch, error_type):
    learner, saver = tiny_learner(), Saver(tmp_path)
    saver.begin(1, learner.snapshot(), keep=())

    def fail(*args):
        raise error_type(28, "No space left on device")

    wait_for(saver, 1)
    monkeypatch.setattr(torch, "save", fail)
    saver.begin(2, learner.snapshot(), keep=())
    ((version, path, error),) = wait_for(saver, 1)
    assert (version, path) == (2, tmp_path / "step-2")
    assert "No space left" in error
    assert [each.name for each in tmp_path.iterdir()] == ["step-1"], "the rest takes no room"
    assert checkpoint.load(tmp_path / "step-1", torch.device("cpu"))["version"] == 0


def test_tied_weights_are_copied_and_written_once(tmp_path: Path):
    learner = tiny_learner()
    learner.model.lm_head.weight = learner.model.model.embed_tokens.weight
    learner.model.config.tie_word_embeddings = True
    copied = checkpoint.snapshot(learner.model, None, {})
    head, embedding = copied.weights["lm_head.weight"], copied.weights["model.embed_tokens.weight"]
    assert head.data_ptr() == embedding.data_ptr()
