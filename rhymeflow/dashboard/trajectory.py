"""The view of one response: the conversation, and of each token what is known about it.

Holds true: per token there is one entry in each list, or the list is `None`: tokens were deleted
(`run.keep_tokens`), or the run kept no details (`run.token_details`).
"""

from __future__ import annotations

import contextlib
import shlex
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rhymeflow.core.types import TrajectoryId
from rhymeflow.dashboard.run import Run
from rhymeflow.errors import UserError
from rhymeflow.learner.algorithms.advantages import decoupled_advantages, group_advantages
from rhymeflow.observe import tokens
from rhymeflow.store.previous_run import config_in_force
from rhymeflow.store.reader import TrajectoryReader

if TYPE_CHECKING:
    from rhymeflow.config import Config

_BATCH = """SELECT group_id, member, reward, components FROM trajectories
    WHERE trained = ?1 AND group_id IN (SELECT group_id FROM groups WHERE ending_version = ?1)
    ORDER BY group_id, member"""


def whole(run: Run, trajectory: TrajectoryId, texts: TokenTexts) -> dict[str, Any]:
    """What is stored of a response, and the text of its tokens.

    Raises:
        UserError: there is no such response.
    """
    with run.reader() as reader:
        config = config_in_force(reader)
        found = tokens.whole(
            run.directory, reader, trajectory, lambda ids: texts.of(run.name, config, ids)
        )
        advantage = _advantage(reader, trajectory, found["step"], config)
    return {
        **found,
        "advantage": advantage,
        "generate": command(run.directory, config, found["prompt"]),
    }


def command(directory: Path, config: Config, prompt: Any) -> str | None:
    """The `rhymeflow generate` line that asks the run's newest checkpoint, or the model that it
    began with, the same; `None` of a conversation, which one line cannot give it."""
    if not isinstance(prompt, str):
        if [message["role"] for message in prompt] != ["user"]:
            return None
        prompt = prompt[0]["content"]
    steps = [path.name.removeprefix("step-") for path in directory.glob("checkpoints/step-*")]
    newest = max((int(step) for step in steps if step.isdecimal()), default=None)
    model = config.model.name if newest is None else str(directory / f"checkpoints/step-{newest}")
    options = ["--temperature", f"{config.rollout.temperature:g}"]
    options += ["--max-tokens", str(config.rollout.max_completion_length)]
    if config.data.system_prompt is not None:
        options += ["--system", config.data.system_prompt]
    return shlex.join(["rhymeflow", "generate", model, prompt, *options])


def _advantage(
    reader: TrajectoryReader, trajectory: TrajectoryId, step: int | None, config: Config
) -> float | None:
    """What the learner gave each token of it, of the rewards of its batch; `None` of what was not
    trained on."""
    if step is None:
        return None
    batch = reader.query(_BATCH, step - 1)
    place = [each[:2] for each in batch].index((trajectory.group, trajectory.member))
    groups = [group for group, *_ in batch]
    if config.learner.multi_objective_aggregation == "normalize_then_sum":
        components = [msgspec.json.decode(each) for *_, each in batch]
        from rhymeflow.reward.components import WeightedSum

        weights = WeightedSum(config.reward.functions, config.environment.classes).weights
        return float(decoupled_advantages(components, weights, groups).values[place])
    rewards = [reward for _, _, reward, _ in batch]
    return float(group_advantages(rewards, groups, config.learner.scale_rewards).values[place])


class TokenTexts:
    """Texts of tokens, by the tokenizer of each run; loaded when the first is asked for."""

    def __init__(self, load: Callable[[Config], Callable[[list[int]], list[str]]]) -> None:
        """`load` returns what makes a text of each token; `UserError` if it cannot be had."""
        self._load, self._lock = load, threading.Lock()
        self._known: dict[str, Callable[[list[int]], list[str]] | None] = {}

    def prepare(self, runs: Sequence[Run]) -> None:
        """Load the tokenizers of these runs: seconds, which nobody should wait for."""
        for run in runs:
            with contextlib.suppress(UserError), run.reader() as reader:  # who asks will be told
                config = config_in_force(reader)
                self.of(run.name, config, [])

    def of(self, run: str, config: Config, ids: list[int]) -> list[str] | None:
        """A text for each token; `None` if this machine has not the run's tokenizer."""
        with self._lock:
            if run not in self._known:
                try:
                    self._known[run] = self._load(config)
                except UserError:
                    self._known[run] = None  # the page says so, and shows numbers
            known = self._known[run]
        return None if known is None else known(ids)


__all__ = ["TokenTexts", "whole"]
