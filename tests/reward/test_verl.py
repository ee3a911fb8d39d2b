"""Functions with verl's signature work by name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rhymeflow.config import RewardFunction
from rhymeflow.errors import UserError
from rhymeflow.reward.functions import Judge
from rhymeflow.reward.messages import RewardRequest, TrainerState

SOURCE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, factor=1.0):
    assert data_source in (None, "gsm")
    return {"score": factor * (solution_str == ground_truth), "acc": 1}


async def later(data_source, solution_str, ground_truth, extra_info, **kwargs):
    return float(solution_str == ground_truth) + (extra_info or {}).get("bonus", 0)
"""


@pytest.fixture
def path(tmp_path) -> Path:
    file = tmp_path / "score.py"
    file.write_text(SOURCE)
    return file


def rewards(spec: str, columns: dict, **options) -> list[float | None]:
    judge = Judge(RewardFunction(function=spec, options=options))
    request = RewardRequest("q", ["4", "5"], [[1], [2]], columns, TrainerState(0, 1))
    with asyncio.Runner() as runner:
        return judge(request, runner)


def test_a_dictionary_s_score_is_the_reward(path):
    columns = {"ground_truth": "4", "other": 3}
    assert rewards(f"{path}:compute_score", columns) == [1.0, 0.0]
    assert rewards(f"{path}:compute_score", columns | {"data_source": "gsm"}, factor=3.0) == [3, 0]


def test_async_functions_and_extra_info(path):
    columns = {"ground_truth": "5", "extra_info": {"bonus": 2}}
    assert rewards(f"{path}:later", columns) == [2.0, 3.0]


def test_what_it_needs_is_looked_for_before_the_run(path):
    judge = Judge(RewardFunction(function=f"{path}:compute_score"))
    judge.check_columns(["ground_truth"])
    with pytest.raises(UserError, match="takes an argument 'ground_truth'"):
        judge.check_columns(["answer"])
    with pytest.raises(UserError, match="no option 'fuctor'; did you mean factor"):
        Judge(RewardFunction(function=f"{path}:compute_score", options={"fuctor": 1}))
