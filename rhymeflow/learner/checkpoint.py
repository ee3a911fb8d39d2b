"""A checkpoint directory: a plain Hugging Face model, its tokenizer, and the learner's state.

    config.json, generation_config.json, model.safetensors, tokenizer files
    learner.pt      master weights, AdamW's moments, version, token count

Holds true: a directory of the final name is complete; plain transformers loads it, without
Rhymeflow. Knows nothing of what the state means.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rhymeflow.errors import UserError

STATE_FILE = "learner.pt"


def save(
    directory: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    state: dict[str, Any],
) -> None:
    """Write everything beside `directory` and put it in place with one rename."""
    unfinished = directory.with_name(directory.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    model.save_pretrained(unfinished)
    if tokenizer is not None:
        tokenizer.save_pretrained(unfinished)
    torch.save(state, unfinished / STATE_FILE)
    if directory.exists():
        shutil.rmtree(directory)
    unfinished.rename(directory)


def load(directory: Path, device: torch.device) -> dict[str, Any]:
    """The state of the checkpoint in `directory`; `UserError` if there is none."""
    path = directory / STATE_FILE
    if not path.is_file():
        raise UserError(f"{directory}: no checkpoint to resume from ({STATE_FILE} is missing)")
    return torch.load(path, map_location=device, weights_only=True)


__all__ = ["load", "save"]
