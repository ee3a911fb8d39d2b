"""The page of one response: its advantage, and the command that asks the same again."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from rhymeflow.core.types import TrajectoryId
from rhymeflow.dashboard import trajectory
from rhymeflow.dashboard.run import Run
from rhymeflow.observe.tokens import TokenTexts
from tests.export.made import MadeRun, model


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("group", [0.7070, -0.7070, 0.0]),
        ("none", [0.5, -0.5, 0.0]),
        ("batch", [0.3333, -0.3333, 0.0]),  # the deviation of 1, 0, 3, 3 is 1.5
    ],
)
def test_the_advantage_is_that_of_its_batch(tmp_path: Path, scale: str, expected) -> None:
    """Two groups of a batch: rewards 1 and 0, and 3 and 3; the third response is of the second."""
    fields = {"learner.scale_rewards": scale}
    made = MadeRun(tmp_path / "run", model(tmp_path / "model"), **fields)
    for group, rewards in ((0, (1.0, 0.0)), (1, (3.0, 3.0))):
        made.group(group)
        for member, reward in enumerate(rewards):
            made.response(group, member, "ab", reward)
        made.store.put_consumed(group, version=0, members=(0, 1))
    made.group(2)
    made.response(2, 0, "ab", 1.0)
    made.store.commit()
    run = Run(made.run_dir, "a")
    texts = TokenTexts()
    which = [TrajectoryId(0, 0), TrajectoryId(0, 1), TrajectoryId(1, 0)]
    found = [trajectory.whole(run, each, texts) for each in which]
    assert [each["advantage"] for each in found] == pytest.approx(expected, abs=1e-3)
    assert found[0]["texts"] == ["a", "b"]
    assert trajectory.whole(run, TrajectoryId(2, 0), texts)["advantage"] is None


def test_the_line_that_asks_the_same_again(tmp_path: Path) -> None:
    fields = {"data.system_prompt": "be brief", "data.chat_template": True}
    made = MadeRun(tmp_path / "a run", model(tmp_path / "model"), **fields)

    made.store.commit()

    def line(prompt: Any) -> str | None:
        with Run(made.run_dir, "a").reader() as reader:
            return trajectory.command(made.run_dir, reader, prompt)

    options = ["--temperature", "1", "--max-tokens", str(made.config.rollout.max_completion_length)]
    options += ["--system", "be brief"]
    asked = ["rhymeflow", "generate", str(tmp_path / "model"), "it's 1?", *options]
    assert shlex.split(line("it's 1?") or "") == asked
    for step in (5, 40, 9):
        (made.run_dir / f"checkpoints/step-{step}").mkdir(parents=True)
    asked[2] = str(made.run_dir / "checkpoints/step-40")
    assert shlex.split(line([{"role": "user", "content": "it's 1?"}]) or "") == asked
    assert line([{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]) is None
