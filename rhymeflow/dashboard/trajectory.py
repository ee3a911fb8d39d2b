"""The view of one response: what `query.response` says, texts of its tokens, its advantage, and the
command that asks the same again."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import msgspec

from rhymeflow.core.types import TrajectoryId
from rhymeflow.dashboard.run import Run
from rhymeflow.learner.algorithms.advantages import decoupled_advantages, group_advantages
from rhymeflow.observe import query
from rhymeflow.observe.tokens import TokenTexts
from rhymeflow.store.checkpoint_dirs import CHECKPOINTS, checkpoints_up_to
from rhymeflow.store.previous_run import section_in_force
from rhymeflow.store.reader import TrajectoryReader

_BATCH = """SELECT group_id, member, reward, components FROM trajectories
    WHERE trained = ?1 AND group_id IN (SELECT group_id FROM groups WHERE ending_version = ?1)
    ORDER BY group_id, member"""


def whole(run: Run, trajectory: TrajectoryId, texts: TokenTexts) -> dict[str, Any]:
    """What is known of a response. Raises `UserError` if there is no such response."""
    with run.reader() as reader:
        found = query.response(run.directory, reader, trajectory)
        return {
            **found,
            "texts": found["tokens"] and texts.of(reader, found["tokens"]),
            "advantage": _advantage(reader, trajectory, found["step"]),
            "generate": command(run.directory, reader, found["prompt"]),
        }


def command(directory: Path, reader: TrajectoryReader, prompt: Any) -> str | None:
    """The `rhymeflow generate` line that asks the run's newest checkpoint, or the model that it
    began with, the same; `None` of a conversation, which one line cannot give it."""
    if not isinstance(prompt, str):
        if [message["role"] for message in prompt] != ["user"]:
            return None
        prompt = prompt[0]["content"]
    there = checkpoints_up_to(directory / CHECKPOINTS, sys.maxsize)
    model, rollout, data = (section_in_force(reader, n) for n in ("model", "rollout", "data"))
    asked = str(there[max(there)]) if there else model.name
    options = ["--temperature", f"{rollout.temperature:g}"]
    options += ["--max-tokens", str(rollout.max_completion_length)]
    if data.system_prompt is not None:
        options += ["--system", data.system_prompt]
    return shlex.join(["rhymeflow", "generate", asked, prompt, *options])


def _advantage(
    reader: TrajectoryReader, trajectory: TrajectoryId, step: int | None
) -> float | None:
    """What the learner gave each token of it, of the rewards of its batch; `None` of what was not
    trained on."""
    if step is None:
        return None
    batch = reader.query(_BATCH, step - 1)
    place = [each[:2] for each in batch].index((trajectory.group, trajectory.member))
    groups = [group for group, *_ in batch]
    learner = section_in_force(reader, "learner")
    if learner.multi_objective_aggregation == "normalize_then_sum":
        from rhymeflow.reward.components import WeightedSum

        reward, environment = (section_in_force(reader, n) for n in ("reward", "environment"))
        weights = WeightedSum(reward.functions, environment.classes).weights
        components = [msgspec.json.decode(each) for *_, each in batch]
        return float(decoupled_advantages(components, weights, groups).values[place])
    rewards = [reward for _, _, reward, _ in batch]
    return float(group_advantages(rewards, groups, learner.scale_rewards).values[place])
