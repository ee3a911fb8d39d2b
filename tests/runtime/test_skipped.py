"""Steps whose gradient is not finite: they are skipped, said and counted, and skipped again."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from examples import plain_loop
from rhymeflow.core.events import LearnerReady, VersionPublished
from rhymeflow.errors import UserError
from rhymeflow.observe import metrics
from tests.runtime.logs import audit, check_replay, replay, train
from tests.runtime.test_resume import SYNCHRONOUS, resume, small, train_until
from tests.runtime.tiny import even_digits, save_model, save_prompts

SPOILED = 1
"""The step, from 0, whose rewards are so large that the gradient's norm overflows."""

LARGEST = 1e15
"""No reward may be larger."""

STEEP = 1e8
"""The last norm of the model is divided by it, and its head has it as a factor: the same policy,
whose gradient is larger."""


def too_large(prompts, completions, completion_ids, trainer_state, **columns) -> list[float]:
    found = even_digits(prompts, completions, completion_ids)
    return [x * LARGEST for x in found] if trainer_state.global_step == SPOILED else found


def always_too_large(prompts, completions, completion_ids, **columns) -> list[float]:
    return [LARGEST * (i == 0) for i, _ in enumerate(completions)]


def a_run(directory: Path, function=too_large, learner=None):
    model = AutoModelForCausalLM.from_pretrained(save_model(directory / "model"))
    with torch.no_grad():
        model.model.norm.weight /= STEEP
        model.lm_head.weight *= STEEP
    model.save_pretrained(directory / "model")
    save_prompts(directory / "prompts.jsonl")
    return small(
        directory,
        learner={
            "scale_rewards": "none",
            "groups_per_batch": 4,
            "learning_rate": 1e-7,
            **(learner or {}),
        },
        reward={"functions": [{"function": f"{__file__}:{function.__name__}"}]},
        run={"save_steps": 0, "save_seconds": 0, "eval_steps": 0},
        **SYNCHRONOUS,
    )


def check_skipped(config, published: int) -> None:
    """Step `SPOILED` made a version of the weights before, and a restored learner had the last."""
    said = [e for e, _ in replay(config) if isinstance(e, VersionPublished | LearnerReady)]
    first = {e.version: e for e in reversed(said) if isinstance(e, VersionPublished)}
    skipped = first[SPOILED + 1]
    assert {v for v, e in first.items() if e.skipped} == {SPOILED + 1}
    assert skipped.skipped == (0,)
    assert "the gradient is not finite" in skipped.reason
    assert skipped.checksum == first[SPOILED].checksum != first[SPOILED + 2].checksum
    rows = metrics.read(Path(config.run.output_dir))
    assert [v for v, row in rows.items() if row.get("skipped_steps")] == [SPOILED + 1]
    (restored,) = (e for e in said if isinstance(e, LearnerReady) and e.version == published)
    assert restored.checksum == first[published].checksum


@pytest.mark.slow
def test_a_skipped_step_is_the_plain_loops_and_is_skipped_again_when_resumed(tmp_path, monkeypatch):
    config = a_run(tmp_path)
    train_until(monkeypatch, config, lambda c: c.training.published == 4)
    resume(tmp_path / "run")
    check_skipped(config, 4)
    check_replay(config)
    audit(tmp_path / "run")
    rows = metrics.read(tmp_path / "run")
    for version, step in enumerate(plain_loop.train(config), start=1):
        assert rows[version]["reward"] == pytest.approx(step.reward)
        for name, value in (("loss", step.loss), ("grad_norm", step.grad_norm)):
            expected = pytest.approx(value, rel=1e-4, abs=1e-6) if math.isfinite(value) else None
            assert rows[version][name] == expected, (version, name)


@pytest.mark.slow
def test_too_many_in_a_row_end_the_run_in_one_line(tmp_path):
    learner = {"max_skipped_steps": 2}
    console = Console(file=io.StringIO(), width=300)
    with pytest.raises(UserError, match=r"2 steps in a row failed \(learner.max_skipped_steps\)"):
        train(a_run(tmp_path, always_too_large, learner=learner), console)
    assert "step 1 is skipped: the gradient is not finite" in console.file.getvalue()
    with pytest.raises(UserError, match="3 steps in a row"):  # counted anew, from step 1 on
        resume(tmp_path / "run", learner__max_skipped_steps="3")
