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
from typing import Any

import msgspec
import numpy as np

from rhymeflow.config import Config
from rhymeflow.core.types import TrajectoryId
from rhymeflow.dashboard.run import Run
from rhymeflow.errors import UserError
from rhymeflow.learner.algorithms.advantages import decoupled_advantages, group_advantages
from rhymeflow.reward.components import WeightedSum
from rhymeflow.store import codec
from rhymeflow.store.previous_run import config_in_force
from rhymeflow.store.reader import TrajectoryReader

_DETAILS = "SELECT logprobs, flags FROM token_details WHERE group_id = ? AND member = ?"
_BATCH = """SELECT group_id, member, reward, components FROM trajectories
    WHERE group_id IN (SELECT group_id FROM side.groups WHERE step = ?) AND trained IS NOT NULL
    ORDER BY group_id, member"""
_ACCEPTED = """SELECT accepted, LENGTH(tokens) / 4, steps FROM segments
    WHERE group_id = ? AND member = ? ORDER BY start"""


def whole(run: Run, trajectory: TrajectoryId, texts: TokenTexts) -> dict[str, Any]:
    """What is stored of a response, and the text of its tokens.

    Raises:
        UserError: there is no such response.
    """
    with run.reader() as reader:
        details = reader.details(trajectory)
        if details is None:
            raise UserError(f"{run.directory}: has no trajectory {trajectory}")
        config = config_in_force(reader)
        learner, flags = _learner(reader, trajectory)
        advantage = _advantage(reader, trajectory, details.trained, config)
        accepted = _accepted(reader, trajectory)
        siblings = reader.query(
            "SELECT member FROM side.responses WHERE group_id = ? ORDER BY member",
            trajectory.group,
        )
        earlier = reader.query(
            "SELECT group_id, epoch FROM side.groups WHERE row = ? AND epoch < ?"
            " ORDER BY epoch DESC LIMIT 20",
            details.row,
            details.epoch,
        )
    segments = [
        {
            "start": each.start,
            "length": each.length,
            "version": each.version,
            "instance": each.instance,
            "steps": each.steps,
            "drafted": each.drafted,
            "observed": each.is_observed,
        }
        for each in details.segments
    ]
    tokens = [token for each in details.segments for token in each.tokens]
    logprobs = [value for each in details.segments for value in each.logprobs]
    return {
        "directory": str(run.directory),
        "group": trajectory.group,
        "member": trajectory.member,
        "row": details.row,
        "epoch": details.epoch,
        "prompt": codec.prompt_of(details.prompt),
        "columns": details.columns,
        "text": details.text,
        "length": details.length,
        "reason": details.reason,
        "reward": details.reward,
        "components": details.components,
        "advantage": advantage,
        "step": None if details.trained is None else details.trained + 1,
        "ending": details.ending,
        "ending_reason": details.ending_reason,
        "segments": segments,
        "tokens": tokens or None,
        "texts": texts.of(run.name, config, tokens) if tokens else None,
        "logprobs": logprobs or None,
        "learner_logprobs": learner,
        "flags": flags,
        "accepted": accepted,
        "siblings": [member for (member,) in siblings],
        "earlier": [{"group": group, "epoch": epoch} for group, epoch in earlier],
        "generate": command(run.directory, config, codec.prompt_of(details.prompt)),
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
    reader: TrajectoryReader, trajectory: TrajectoryId, trained: int | None, config: Config
) -> float | None:
    """What the learner gave each token of it, of the rewards of its batch; `None` of what was not
    trained on."""
    if trained is None:
        return None
    batch = reader.query(_BATCH, trained + 1)
    if (trajectory.group, trajectory.member) not in [each[:2] for each in batch]:
        return None  # the side index does not have the step yet
    place = [each[:2] for each in batch].index((trajectory.group, trajectory.member))
    groups = [group for group, *_ in batch]
    if config.learner.multi_objective_aggregation == "normalize_then_sum":
        components = [msgspec.json.decode(each) for *_, each in batch]
        weights = WeightedSum(config.reward.functions, config.environment.classes).weights
        return float(decoupled_advantages(components, weights, groups).values[place])
    rewards = [reward for _, _, reward, _ in batch]
    return float(group_advantages(rewards, groups, config.learner.scale_rewards).values[place])


def _learner(
    reader: TrajectoryReader, trajectory: TrajectoryId
) -> tuple[list[float] | None, list[int] | None]:
    rows = reader.query(_DETAILS, *trajectory)
    if not rows:
        return None, None
    logprobs, flags = rows[0]
    found = None if logprobs is None else np.frombuffer(logprobs, "<f4").tolist()
    return found, list(flags)


def _accepted(reader: TrajectoryReader, trajectory: TrajectoryId) -> list[int] | None:
    """1 for a token that was drafted; none of them is known where a segment does not say."""
    found: list[int] = []
    for accepted, length, steps in reader.query(_ACCEPTED, *trajectory):
        if accepted is None and steps:
            return None
        found += [0] * length if accepted is None else list(accepted)
    return found or None


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

    def of(self, run: str, config: Config, tokens: list[int]) -> list[str] | None:
        """A text for each token; `None` if this machine has not the run's tokenizer."""
        with self._lock:
            if run not in self._known:
                try:
                    self._known[run] = self._load(config)
                except UserError:
                    self._known[run] = None  # the page says so, and shows numbers
            known = self._known[run]
        return None if known is None else known(tokens)


def load_texts(config: Config) -> Callable[[list[int]], list[str]]:
    """Return what makes a text of each token with the run's tokenizer."""
    from rhymeflow.models.tokenizer import load_tokenizer  # loads transformers

    tokenizer = load_tokenizer(config.model)
    return lambda tokens: [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]


__all__ = ["TokenTexts", "load_texts", "whole"]
