"""One response in full: what is known of each token, and what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rhymeflow.config import Config
from rhymeflow.core.types import TrajectoryId
from rhymeflow.dashboard import trajectory
from rhymeflow.dashboard.run import Run
from rhymeflow.dashboard.trajectory import TokenTexts, load_texts
from rhymeflow.errors import UserError
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

    def missing(config: Config) -> Any:
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
