"""Requests to reward functions."""

from __future__ import annotations

from typing import Any

import msgspec


class TrainerState(msgspec.Struct, frozen=True):
    """Progress of training: fields of TRL's `trainer_state`."""

    global_step: int  # versions published when the responses were submitted
    max_steps: int


class RewardRequest(msgspec.Struct, frozen=True):
    """Responses to one prompt, scored together; `columns` are those of the prompt's row."""

    prompt: str | list[dict[str, Any]]
    completions: list[str]
    completion_ids: list[list[int]]
    columns: dict[str, Any]
    trainer_state: TrainerState
    turns: list[list[str]] = []
    """With environments, for each response: texts of policy and environment, alternating."""
    seen: str | list[dict[str, Any]] | None = None
    """For reward models: the prompt as the policy read it, text or messages, with
    `data.assistant_prefix`."""
