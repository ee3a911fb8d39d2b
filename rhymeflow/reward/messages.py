"""What reward functions are asked about."""

from __future__ import annotations

from typing import Any

import msgspec


class TrainerState(msgspec.Struct, frozen=True):
    """How far training is: what TRL's `trainer_state` says of it."""

    global_step: int
    """Versions published when the responses were handed in."""
    max_steps: int


class RewardRequest(msgspec.Struct, frozen=True):
    """Responses to one prompt, judged together; `columns` are those of the prompt."""

    prompt: str | list[dict[str, Any]]
    completions: list[str]
    completion_ids: list[list[int]]
    columns: dict[str, Any]
    trainer_state: TrainerState
    turns: list[list[str]] = []
    """Where there are environments, of each: what the policy and its environment said, by turns."""
    seen: str | list[dict[str, Any]] | None = None
    """For reward models: the prompt as the policy was given it, text or messages, with what
    `data.assistant_prefix` begins the answer by."""
