"""How a test has a reward function judge responses, in this process."""

import asyncio
from typing import Any

from rhymeflow.config import RewardFunction
from rhymeflow.reward.functions import Judge
from rhymeflow.reward.messages import RewardRequest, TrainerState


def judged(
    function: str | Judge, completions: list[str], columns: dict[str, Any] | None = None,
    *, prompt: Any = "p", turns: Any = (), seen: Any = None, **options: Any,
) -> list[float | None]:  # fmt: skip
    judge = function
    if isinstance(judge, str):
        judge = Judge(RewardFunction(function=judge, options=options))
    ids = [[number + 1] for number in range(len(completions))]
    state = TrainerState(0, 1)
    asked = RewardRequest(prompt, completions, ids, columns or {}, state, list(turns), seen)
    with asyncio.Runner() as runner:
        return judge(asked, runner)
