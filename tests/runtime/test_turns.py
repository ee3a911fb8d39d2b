"""Real runs whose responses have turns: neither deaths nor drafts change them."""

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from rhymeflow.runtime.controller import Controller
from tests.runtime import talkers
from tests.runtime.logs import audit, check_replay, reader, tokens, train
from tests.runtime.test_resume import SYNCHRONOUS, learned, resume, train_until
from tests.runtime.tiny import save_model, save_prompts, tiny_config

pytestmark = pytest.mark.slow

STEPS = 4
EOS = 1


def config_of(directory: Path, kind: str, name: str = "run", **sections):
    """Of a model that ends a turn after some fifteen tokens."""
    if not (directory / "model").exists():
        save_model(directory / "model", max_length=512)
        save_prompts(directory / "prompts.jsonl")
    environment = {"timeout": 5.0, **sections.pop("environment", {})}
    known = {"environment": f"{talkers.__file__}:{kind}"}
    return tiny_config(
        directory,
        environment={"classes": [known], **environment},
        reward=sections.pop("reward", {"functions": []}),
        rollout={"max_completion_length": 200, "max_num_seqs": 8, **sections.pop("rollout", {})},
        learner={"max_steps": STEPS, **sections.pop("learner", {})},
        run={"eval_steps": 2, "output_dir": str(directory / name), **sections.pop("run", {})},
        **sections,
    )


def check_conversations(config) -> int:
    """Every answer is to the very turn before it, encoded; return how many there are."""
    tokenizer = AutoTokenizer.from_pretrained(config.model.name)
    turns: dict[tuple[int, int], list[int]] = {}
    count = 0
    with closing(reader(config)) as log:
        columns = {g: json.loads(c) for g, c in log.query("SELECT group_id, columns FROM groups")}
        segments = log.query(
            "SELECT group_id, member, instance, steps, tokens FROM segments ORDER BY 1, 2, start"
        )
    for group, member, instance, steps, blob in segments:
        made = np.frombuffer(blob, "<i4").tolist()
        assert (instance == "environment") == (steps == 0)
        if instance != "environment":
            turns.setdefault((group, member), []).extend(made)
            continue
        turn = turns.pop((group, member))
        assert turn[-1] == EOS
        assert EOS not in turn[:-1]
        text = tokenizer.decode(turn, skip_special_tokens=True)
        said = talkers.answer(text, columns[group]["answer"])
        assert made == tokenizer(said, add_special_tokens=False)["input_ids"]
        count += 1
    return count


def test_neither_drafts_nor_a_death_while_an_environment_answers_change_anything(
    tmp_path, monkeypatch
):
    """Under a synchronous schedule: tokens, losses and held-out rewards, to the last bit."""
    straight = config_of(tmp_path, "Opener", name="straight", **SYNCHRONOUS)
    train(straight)
    config = config_of(tmp_path, "Opener", drafting={"window": "cost"}, **SYNCHRONOUS)

    def is_waiting(controller: Controller) -> bool:
        asked = [s for s, _ in controller.environments._asked.values()]
        is_response = (hasattr(s, "member") and s.group >= 0 for s in asked)
        return controller.training.published == 1 and any(is_response)

    train_until(monkeypatch, config, is_waiting)
    assert resume(tmp_path / "run").steps == STEPS
    assert tokens(tmp_path / "run") == tokens(tmp_path / "straight")
    assert learned(tmp_path / "run") == learned(tmp_path / "straight")
    check_replay(config)
    audit(tmp_path / "run")
    assert check_conversations(config) > 0
