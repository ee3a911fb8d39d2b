"""Groups and tokens from the store alone: the same answers as by the dashboard's side index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rhymeflow.config import Config
from rhymeflow.config.load import build_config
from rhymeflow.core.types import TrajectoryId
from rhymeflow.dashboard import groups as dashboard_groups
from rhymeflow.dashboard import trajectory as dashboard_trajectory
from rhymeflow.dashboard.run import Run
from rhymeflow.errors import UserError
from rhymeflow.observe import stored_groups, tokens
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.observe.runs import make_run


def shown(numbers: list[int]) -> list[str]:
    """Stands for a tokenizer."""
    return [f"t{number}" for number in numbers]


def load(config: Config) -> Any:
    assert config.model.name == "recipe:demo"
    return shown


def unloadable(config: Config) -> Any:
    raise UserError("no such model")


@pytest.fixture
def reader(tmp_path: Path) -> TrajectoryReader:
    """See `make_run`; then group 10, the prompt of group 4 again, with all that can be known of a
    response, one that is going on, and one that has no token yet."""
    make_run(tmp_path)
    store = SqliteTrajectoryStore(tmp_path / "events.db")
    config = build_config({"model.name": "recipe:demo"}, where="test")
    store.begin_attempt(config.model_dump_json(), now=0.0, started="2026-01-02T03:04:05Z")
    store.put_group(
        10, row=4, epoch=1, prompt=[{"role": "user", "content": "again"}],
        prompt_tokens=[1], columns={},
    )  # fmt: skip
    which = TrajectoryId(10, 0)
    store.put_segment(
        which, start=0, version=1, instance="rollout-0", steps=1, drafted=3, tokens=[5, 6],
        logprobs=[-0.5, -1.0], accepted=b"\0\1",
    )  # fmt: skip
    store.put_observed(which, start=2, version=1, tokens=[7, 8])
    store.put_segment(
        which, start=4, version=2, instance="rollout-1", steps=1, drafted=0, tokens=[9],
        logprobs=[-0.25], accepted=b"\0",
    )  # fmt: skip
    store.put_finished(which, length=5, reason="finished_early")
    store.put_text(which, "said")
    store.put_reward(which, reward=0.5, components={"exact": 0.5})
    store.put_segment(
        TrajectoryId(10, 1), start=0, version=3, instance="r", steps=1, drafted=0, tokens=[5],
        logprobs=[-0.5],
    )  # fmt: skip
    store.put_consumed(10, version=3, members=(0,))
    learner = np.array([-0.5, -1.5, 0, 0, -0.25], "<f4").tobytes()
    store.put_token_details(which, logprobs=learner, flags=bytes([0, 1, 4, 4, 0]))
    store.put_group(11, row=4, epoch=2, prompt="none", prompt_tokens=[1], columns={})
    store.commit()
    store.close()
    return TrajectoryReader(tmp_path / "events.db")


def is_same(mine: Any, theirs: Any) -> bool:
    """Each key of mine is theirs, with the same value."""
    if isinstance(mine, dict):
        return all(name in theirs and is_same(mine[name], theirs[name]) for name in mine)
    if isinstance(mine, list):
        pairs = zip(mine, theirs, strict=True)
        return len(mine) == len(theirs) and all(is_same(*pair) for pair in pairs)
    return bool(mine == pytest.approx(theirs) if isinstance(mine, float) else mine == theirs)


@pytest.mark.parametrize("group", [0, 4, 7, 8, 9, 10, 11])
def test_a_group_is_what_the_dashboard_says_of_it(reader: TrajectoryReader, group: int) -> None:
    run = Run(reader.path.parent, "a")
    mine, theirs = stored_groups.whole(reader, group), dashboard_groups.whole(run, group)
    assert mine is not None
    assert is_same(mine, theirs), (mine, theirs)


def test_the_groups_of_a_step_are_what_the_dashboard_says_of_them(reader: TrajectoryReader) -> None:
    run = Run(reader.path.parent, "a")
    for step in (1, 3, 4):
        asked = dashboard_groups.Asked(step=step, sort="spread", descending=True)
        theirs = dashboard_groups.listed(run, asked)["groups"]
        mine = [
            each for each in stored_groups.of_step(reader, step) if each["ending"] == "consumed"
        ]
        spreads = [each["reward_max"] - each["reward_min"] for each in mine]
        assert spreads == sorted(spreads, reverse=True)  # of equal ones the order is free
        mine.sort(key=lambda each: each["group"])
        assert is_same(mine, sorted(theirs, key=lambda each: each["group"]))


def test_a_step_has_its_batch_and_what_was_left_out_meanwhile(reader: TrajectoryReader) -> None:
    def those(step: int) -> list[tuple[int, str]]:
        found = stored_groups.of_step(reader, step)
        return [(group["group"], group["ending"]) for group in found]

    assert those(2) == [(2, "consumed"), (3, "consumed"), (8, "aborted")]
    # Of group 10 one response has a reward: no spread. Groups 6 and 7 have the rewards 1 and 0.
    assert those(4) == [(6, "consumed"), (7, "consumed"), (10, "consumed")]
    assert those(9) == []
    assert stored_groups.whole(reader, 99) is None


@pytest.mark.parametrize("which", [(4, 0), (8, 1), (9, 0), (10, 0), (10, 1)])
def test_a_response_is_what_the_dashboard_says_of_it(
    reader: TrajectoryReader, which: tuple[int, int]
) -> None:
    run_dir, trajectory = reader.path.parent, TrajectoryId(*which)
    texts = dashboard_trajectory.TokenTexts(load)
    theirs = dashboard_trajectory.whole(Run(run_dir, "a"), trajectory, texts)
    mine = tokens.whole(run_dir, reader, trajectory, load)
    assert is_same(mine, theirs), (mine, theirs)


def test_tokens_with_what_is_known_of_each(reader: TrajectoryReader) -> None:
    found = tokens.tokens_of(tokens.whole(reader.path.parent, reader, TrajectoryId(10, 0), load))
    assert found[1] == tokens.Token(1, "t6", 1, False, -1.0, -1.5, True, 1)
    assert found[2] == tokens.Token(2, "t7", 1, True, None, None, None, 4)
    assert found[4] == tokens.Token(4, "t9", 2, False, -0.25, -0.25, False, 0)
    whole = tokens.whole(reader.path.parent, reader, TrajectoryId(10, 1), unloadable)
    assert whole["texts"] is None
    assert tokens.tokens_of(whole) == [tokens.Token(0, "⟨5⟩", 3, False, -0.5, None, None, None)]


def test_of_deleted_tokens_there_are_none(reader: TrajectoryReader) -> None:
    store = SqliteTrajectoryStore(reader.path)
    for _ in range(3):
        store.prune(before=99, history_tokens=0)
        store.commit()
    store.close()
    found = tokens.whole(reader.path.parent, reader, TrajectoryId(0, 0), load)
    assert found["tokens"] is found["texts"] is found["logprobs"] is None
    assert tokens.tokens_of(found) == []
    assert [member["length"] for member in stored_groups.of_step(reader, 1)[0]["members"]] == [
        10, 100,
    ]  # fmt: skip
