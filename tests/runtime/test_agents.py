"""Real runs of an agent: what is trained on is what was read, and a death changes nothing."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from rhymeflow.errors import UserError
from rhymeflow.observe import metrics
from rhymeflow.runtime.controller import Controller
from tests.runtime import callers
from tests.runtime.logs import audit, check_replay, reader, train
from tests.runtime.test_resume import SYNCHRONOUS, learned, resume, train_until
from tests.runtime.tiny import save_model, save_prompts, tiny_config

pytestmark = pytest.mark.slow

STEPS = 2
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)


def config_of(directory: Path, program: str = "calls", name: str = "run", **sections):
    if not (directory / "model").exists():
        save_model(directory / "model", max_length=256)
        save_prompts(directory / "prompts.jsonl")
        (directory / "template.jinja").write_text(TEMPLATE)
    environment = {"idle_timeout": 30.0, **sections.pop("environment", {})}
    return tiny_config(
        directory,
        data={"chat_template": str(directory / "template.jinja")},
        environment={"agent": f"{callers.__file__}:{program}", **environment},
        reward={"functions": []},
        rollout={"max_completion_length": 60, "max_num_seqs": 8, **sections.pop("rollout", {})},
        learner={"max_steps": STEPS, "off_policy_correction": "none"},
        run={"eval_steps": 2, "output_dir": str(directory / name)},
        **sections,
    )


def test_what_is_trained_on_is_what_was_read_and_a_death_changes_nothing(tmp_path, monkeypatch):
    straight = config_of(tmp_path, name="straight", **SYNCHRONOUS)
    train(straight)
    found = metrics.read(tmp_path / "straight")
    for step in range(1, STEPS + 1):  # the learner finds what the engine sampled as likely as it
        assert found[step]["off_policy/mismatch_kl"] < 1e-9
        assert found[step]["turns/mean"] == 4
    audit(tmp_path / "straight")
    with closing(reader(straight)) as log:
        follows = {each for (each,) in log.query("SELECT follows FROM segments WHERE steps = 0")}
        begun = log.query(
            "SELECT COUNT(*) FROM segments WHERE follows = 0 AND start > 0 AND steps = 0"
        )
    assert None not in follows
    assert len(follows) > 2
    assert begun[0][0] > 0, "no response has a second conversation"

    config = config_of(tmp_path, drafting={"window": "cost"}, **SYNCHRONOUS)

    def is_answered(controller: Controller) -> bool:
        groups = controller.in_flight._groups.values()
        return controller.training.published == 1 and any(
            group.drawn.group >= 0 and any(each.answered for each in group.calls.values())
            for group in groups
        )

    train_until(monkeypatch, config, is_answered)
    assert resume(tmp_path / "run").steps == STEPS
    with closing(reader(config)) as log:
        reasons = log.query("SELECT ending_reason FROM groups WHERE ending = 'aborted'")
    assert any("its prompt is retried" in reason for (reason,) in reasons)
    check_replay(config)
    audit(tmp_path / "run")
    one, other = learned(tmp_path / "run"), learned(tmp_path / "straight")
    assert one.keys() == other.keys()
    for step, row in one.items():
        for name in row.keys() & other[step].keys():
            assert row[name] == pytest.approx(other[step][name], rel=1e-3, abs=1e-5), (step, name)


def test_a_program_that_fails_ends_the_run_or_drops_its_group_by_name(tmp_path):
    with pytest.raises(UserError, match=r"the agent of .* raised RuntimeError: no more"):
        train(config_of(tmp_path, "fails"))
