"""Real runs whose responses have turns: every law, and what befalls environments and workers."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from transformers import AutoTokenizer

from rhymeflow.core.events import EnvironmentFailed, EpisodeEnded, Observed, TurnEnded
from rhymeflow.core.strategies.schedules import SCHEDULES
from rhymeflow.errors import UserError
from rhymeflow.observe import metrics
from rhymeflow.runtime.controller import Controller
from tests.runtime import talkers
from tests.runtime.logs import check_bound, check_replay, reader, replay, train
from tests.runtime.test_resume import SYNCHRONOUS, audit, learned, resume, tokens, train_until
from tests.runtime.tiny import save_model, save_prompts, tiny_config

pytestmark = pytest.mark.slow

STEPS = 4
EOS = 1


def config_of(directory: Path, kind: str = "Talker", name: str = "run", **sections):
    """Of a model that ends a turn after some fifteen tokens."""
    if not (directory / "model").exists():
        save_model(directory / "model", max_length=512)
        save_prompts(directory / "prompts.jsonl")
    environment = {"timeout": 5.0, **sections.pop("environment", {})}
    options = environment.pop("options", {})
    known = {"environment": f"{talkers.__file__}:{kind}", "options": options}
    return tiny_config(
        directory,
        environment={"classes": [known], **environment},
        reward={"functions": []},
        rollout={"max_completion_length": 200, "max_num_seqs": 8, **sections.pop("rollout", {})},
        learner={"max_steps": STEPS, **sections.pop("learner", {})},
        run={"eval_steps": 2, "output_dir": str(directory / name), **sections.pop("run", {})},
        **sections,
    )


def segments(config) -> dict[tuple[int, int], list[tuple[str, list[int]]]]:
    """Of each response: who made which tokens, in order."""
    log = reader(config)
    found: dict = {}
    for group, member, instance, steps, blob in log.query(
        "SELECT group_id, member, instance, steps, tokens FROM segments ORDER BY 1, 2, start"
    ):
        assert (instance == "environment") == (steps == 0)
        made = np.frombuffer(blob, "<i4").tolist()
        found.setdefault((group, member), []).append((instance, made))
    log.close()
    return found


def check_conversations(config) -> int:
    """Every answer is to the very turn before it, encoded; return how many there are."""
    tokenizer = AutoTokenizer.from_pretrained(config.model.name)
    log = reader(config)
    columns = {g: json.loads(c) for g, c in log.query("SELECT group_id, columns FROM groups")}
    log.close()
    count = 0
    for (group, _), parts in segments(config).items():
        turn: list[int] = []
        for instance, made in parts:
            if instance != "environment":
                turn += made
                continue
            assert turn[-1] == EOS
            assert EOS not in turn[:-1]
            text = tokenizer.decode(turn, skip_special_tokens=True)
            said = talkers.answer(text, columns[group]["answer"])
            assert made == tokenizer(said, add_special_tokens=False)["input_ids"]
            turn, count = [], count + 1
    return count


def check_run(config, summary) -> None:
    """What holds of every run with turns."""
    assert summary.steps == config.learner.max_steps
    check_replay(config)
    check_bound(config)
    audit(Path(config.run.output_dir))
    assert check_conversations(config) > 0


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_under_every_schedule_responses_have_turns_and_all_laws_hold(name, tmp_path):
    bound = {"synchronous": None, "one_step": None, "histopipe": None}.get(name, 2)
    config = config_of(
        tmp_path,
        schedule={"name": name, "max_staleness": bound, "extra_generations": 1},
        rollout={"num_instances": 2},
        drafting={"window": "cost"} if name == "rhymeflow" else {},
    )
    check_run(config, train(config))
    events = [event for event, _ in replay(config)]
    asked = [e for e in events if isinstance(e, TurnEnded)]
    answers = [e for e in events if isinstance(e, Observed | EpisodeEnded)]
    assert len({(e.trajectory, e.turn) for e in asked}) == len(asked)
    assert {(e.trajectory, e.turn) for e in answers} <= {(e.trajectory, e.turn) for e in asked}
    assert max(e.turn for e in asked) == talkers.TURNS
    rows = metrics.read(tmp_path / "run")
    assert rows[STEPS]["turns/mean"] > 1
    assert any("rewards/Talker/mean" in row for row in rows.values())
    assert "eval/reward" in rows[0]


def test_drafts_change_nothing(tmp_path):
    """Under a synchronous schedule: tokens, losses and held-out rewards, to the last bit."""
    found = []
    for window in ("off", "cost"):
        config = config_of(tmp_path, name=window, drafting={"window": window}, **SYNCHRONOUS)
        train(config)
        found.append((tokens(tmp_path / window), learned(tmp_path / window)))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["Talker", "Opener"])
def test_a_run_that_is_killed_while_an_environment_answers_is_the_same(tmp_path, monkeypatch, kind):
    straight = config_of(tmp_path, kind, name="straight", **SYNCHRONOUS)
    train(straight)
    config = config_of(tmp_path, kind, **SYNCHRONOUS)

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


@pytest.mark.parametrize("victim", ["environment", "rollout-0"])
def test_a_worker_that_dies_between_two_turns_is_replaced(tmp_path, monkeypatch, victim):
    config = config_of(tmp_path, "Slow", rollout={"num_instances": 2})
    struck: list[int] = []
    turn = Controller._tick

    def tick(self):
        supervisor = self.supervisor
        workers = {"environment": getattr(supervisor, "environments", None), **supervisor.instances}
        waiting = [s for s, _ in self.environments._asked.values() if hasattr(s, "member")]
        if not struck and self.training.published >= 1 and waiting:
            struck.append(workers[victim].pid)
            os.kill(struck[0], signal.SIGKILL)
        turn(self)

    monkeypatch.setattr(Controller, "_tick", tick)
    console = Console(file=io.StringIO())
    check_run(config, train(config, console))
    assert struck
    assert f"warning: {victim}" in console.file.getvalue()


@pytest.mark.parametrize("how", ["raises", "hangs", "dies"])
def test_what_an_environment_does_once_costs_a_try(tmp_path, how):
    once = {"how": how, "once": str(tmp_path / "done")}
    config = config_of(tmp_path, "Bad", environment={"timeout": 1.0, "options": once})
    check_run(config, train(config))
    assert (tmp_path / "done").exists()
    assert not [e for e, _ in replay(config) if isinstance(e, EnvironmentFailed)]


def test_what_it_does_always_ends_the_group_or_the_run_and_is_no_reward(tmp_path):
    environment = {"options": {"how": "raises"}, "on_failure": "drop"}
    config = config_of(tmp_path, "Bad", environment=environment, learner={"max_steps": 6})
    summary = train(config)
    assert summary.steps == 6
    assert summary.endings["aborted"] > 0
    failed = [e for e, _ in replay(config) if isinstance(e, EnvironmentFailed)]
    assert failed
    assert all("no, thank you" in e.error for e in failed)
    audit(tmp_path / "run")
    stops = config_of(tmp_path, "Bad", name="stops", environment={"options": {"how": "raises"}})
    with pytest.raises(UserError, match="no, thank you"):
        train(stops)


def test_an_answer_too_long_for_the_response_ends_it(tmp_path):
    config = config_of(tmp_path, rollout={"max_completion_length": 24})
    train(config)
    reasons = {e.reason for e, _ in replay(config) if isinstance(e, EpisodeEnded)}
    assert "length" in reasons
    assert all(sum(len(made) for _, made in parts) <= 24 for parts in segments(config).values())


def test_max_turns_ends_a_response(tmp_path):
    config = config_of(tmp_path, environment={"max_turns": 2})
    check_run(config, train(config))
    turns = {e.turn: e.reason for e, _ in replay(config) if isinstance(e, EpisodeEnded)}
    assert turns == {2: "max_turns"}
    lines = [json.loads(each) for each in (tmp_path / "run" / "metrics.jsonl").open()]
    cut = [line["completions/clipped_ratio"] for line in lines if "loss" in line]
    assert cut == [0.0] * STEPS  # the policy ended its turns
