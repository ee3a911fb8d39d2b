"""One response in full: what is known of each token, and what is not."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rhymeflow.config import ModelConfig
from rhymeflow.core.types import TrajectoryId
from rhymeflow.dashboard import trajectory
from rhymeflow.dashboard.run import Run
from rhymeflow.errors import UserError
from rhymeflow.observe.tokens import TokenTexts, load_texts
from tests.export.made import MadeRun, model


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    return MadeRun(tmp_path / "run", model(tmp_path / "model"))


def shown(made: MadeRun, which: TrajectoryId, load: Any = load_texts) -> dict[str, Any]:
    made.store.commit()
    return trajectory.whole(Run(made.run_dir, "a"), which, TokenTexts(load))


def test_every_token_with_what_is_known_of_it(made: MadeRun) -> None:
    which = TrajectoryId(0, 1)
    made.group(0, row=4)
    made.response(0, 0, "a")
    tokens = made.ids("ab")
    made.store.put_segment(
        which, start=0, version=1, instance="rollout-0", steps=1, drafted=3, tokens=tokens,
        logprobs=[-0.5, -1.0], accepted=b"\0\1",
    )  # fmt: skip
    made.store.put_observed(which, start=2, version=1, tokens=made.ids("=3"))
    made.store.put_segment(
        which, start=4, version=2, instance="rollout-1", steps=1, drafted=0, tokens=made.ids("c"),
        logprobs=[-0.25], accepted=b"\0",
    )  # fmt: skip
    made.store.put_finished(which, length=5, reason="stop")
    made.store.put_text(which, "ab=3c")
    made.store.put_reward(which, reward=0.5, components={"exact": 0.5})
    learner = np.array([-0.5, -1.5, 0, 0, -0.25], "<f4")
    made.store.put_consumed(0, version=3, members=(1,))
    made.store.put_token_details(which, logprobs=learner.tobytes(), flags=bytes([0, 1, 4, 4, 0]))
    found = shown(made, which)
    assert found["texts"] == list("ab=3c")
    assert found["logprobs"] == [-0.5, -1.0, 0, 0, -0.25]
    assert found["learner_logprobs"] == [-0.5, -1.5, 0, 0, -0.25]
    assert found["flags"] == [0, 1, 4, 4, 0]
    assert found["accepted"] == [0, 1, 0, 0, 0]
    assert [(each["start"], each["version"], each["observed"]) for each in found["segments"]] == [
        (0, 1, False), (2, 1, True), (4, 2, False),
    ]  # fmt: skip
    assert (found["step"], found["reward"], found["components"]) == (4, 0.5, {"exact": 0.5})
    assert (found["row"], found["siblings"], found["prompt"]) == (4, [0, 1], "q?")


def test_what_is_not_known_is_none(made: MadeRun) -> None:
    made.group(0)
    made.response(0, 0, "ab", None)
    found = shown(made, TrajectoryId(0, 0))
    for name in ("flags", "learner_logprobs", "accepted", "step", "reward"):
        assert found[name] is None, name

    def missing(model: ModelConfig) -> Any:
        raise UserError("no such model")

    assert shown(made, TrajectoryId(0, 0), missing)["texts"] is None
    with pytest.raises(UserError, match=r"has no trajectory 7\.0"):
        shown(made, TrajectoryId(7, 0))


def test_tokens_that_were_deleted(made: MadeRun) -> None:
    made.group(0)
    made.response(0, 0, "ab")
    made.store.put_ending(0, "aborted", version=1, reason="boom")
    made.group(1)
    made.response(1, 0, "a")
    made.store.commit()
    made.store.prune(before=9, history_tokens=0)
    made.store.commit()
    made.store.prune(before=9, history_tokens=0)
    found = shown(made, TrajectoryId(0, 0))
    assert found["tokens"] is found["texts"] is found["logprobs"] is None
    assert [each["length"] for each in found["segments"]] == [2]


def test_the_same_prompt_in_earlier_epochs(made: MadeRun) -> None:
    for group in range(3):
        made.store.put_group(group, row=5, epoch=group, prompt="q?", prompt_tokens=[1], columns={})
        made.response(group, 0, "a")
    assert shown(made, TrajectoryId(2, 0))["earlier"] == [
        {"group": 1, "epoch": 1}, {"group": 0, "epoch": 0},
    ]  # fmt: skip


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
    texts = TokenTexts(load_texts)
    which = [TrajectoryId(0, 0), TrajectoryId(0, 1), TrajectoryId(1, 0)]
    found = [trajectory.whole(run, each, texts)["advantage"] for each in which]
    assert found == pytest.approx(expected, abs=1e-3)
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
