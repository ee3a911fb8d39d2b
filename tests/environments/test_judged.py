"""Reward functions that are handed environments: part of the reward where these live."""

import asyncio
from functools import partial
from typing import Any

import pytest

from rhymeflow.config import EnvironmentClass, EnvironmentConfig
from rhymeflow.environments.judged import judged_by, wants_environments
from rhymeflow.environments.kinds import Kind, load_kinds
from rhymeflow.environments.live import LiveEnvironment
from rhymeflow.environments.messages import Opening
from rhymeflow.errors import UserError
from rhymeflow.utils import user_modules
from tests.environments import worlds


class Purse:
    def __init__(self, coins: int = 3) -> None:
        self.coins = coins

    def reset(self, extra: int = 0) -> None:
        self.coins += extra

    def spend(self, number: int) -> str:
        """Spend.

        Args:
            number: How many."""
        self.coins -= number
        return f"{self.coins}"


class Generous(Purse):
    async def get_reward(self) -> float:
        return 100.0


def left(environments: list[Purse], goal: list[int], **columns: Any) -> list[float]:
    return [float(each.coins - right) for each, right in zip(environments, goal, strict=True)]


async def nothing(environments: list[Purse]) -> list[float | None]:
    return [None for _ in environments]


def needs_texts(environments: list[Purse], completions: list[str]) -> list[float]:
    return [0.0]


def kind_of(environment: str) -> Kind:
    classes = (EnvironmentClass(environment=environment),)
    (kind,) = load_kinds(EnvironmentConfig(classes=classes))
    return kind


@pytest.mark.parametrize(
    ("made", "reward"), [(Purse, 8.0), (Generous, 108.0), (partial(Purse, 10), 22.0)]
)
def test_functions_are_part_of_the_reward(tmp_path, made, reward):
    judged = judged_by(made, [(left, 2.0), (nothing, 5.0)])
    path = tmp_path / "objects.pickle"
    path.write_bytes(user_modules.dumped({"Purse": judged}))
    kind = kind_of(f"{path}:Purse")
    assert list(kind.methods or {}) == ["spend"]

    async def episode() -> float | None:
        environment = LiveEnvironment(0, EnvironmentConfig(), kind, [])
        await environment.open(Opening(0, 1, "p", {"extra": 2, "goal": 1}))
        return (await environment.judge()).value

    assert asyncio.run(episode()) == reward


def test_a_function_may_make_the_environment():
    kind, other = (kind_of(f"{worlds.FILE}:{name}") for name in ("counter", "Counter"))
    assert list(kind.methods or {}) == list(other.methods or {})
    assert (kind.name, other.name) == ("counter", "Counter")


def test_functions_are_known_by_the_argument():
    assert wants_environments(left)
    assert not wants_environments(lambda completions, **columns: [])
    with pytest.raises(UserError, match="needs_texts takes environments and completions"):
        judged_by(Purse, [(needs_texts, 1.0)])


def test_a_column_is_not_replaced_by_the_argument():
    with pytest.raises(ValueError, match="column 'environments', which is the name of an arg"):
        judged_by(Purse, [(left, 1.0)])().reset(environments="mine")
