"""A checkpoint directory: a plain Hugging Face model, its tokenizer, and the learner's state.

    config.json, generation_config.json, model.safetensors, tokenizer files
    learner.pt      master weights, AdamW's moments, version, token count
    learner/        the same, where many ranks wrote it: `sharded_checkpoint.py`

Holds true: a directory of the final name is complete, also after a loss of power; plain
transformers loads it, without Rhymeflow; a `Snapshot` is a copy, so training may go on while it is
written. Knows nothing of what the state means, or of when a checkpoint is due.
"""

from __future__ import annotations

import copy
import pickle
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from rhymeflow.errors import UserError
from rhymeflow.models.load import stop_token_ids
from rhymeflow.store.checkpoint_dirs import UNFINISHED
from rhymeflow.utils.disk import flush

STATE_FILE = "learner.pt"

SHARDS = "learner"
"""The directory that many ranks write in place of `STATE_FILE`."""


class Snapshot(NamedTuple):
    """All that a checkpoint holds, at one version."""

    model: PreTrainedModel
    """For its class and configuration; its parameters may have changed since."""
    weights: dict[str, Tensor]
    tokenizer: PreTrainedTokenizerBase | None
    state: dict[str, Any] | None
    """What training continues from; `None`: it ends here, and only the model is written."""

    def write(self, directory: Path) -> None:
        """Write everything beside `directory` and put it in place with one rename."""
        unfinished = begin(directory)
        try:
            self.fill(unfinished)
            finish(unfinished, directory)
        except BaseException:  # on a full disk what there is of it would only be in the way
            shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def fill(self, unfinished: Path) -> None:
        """Write everything into a directory that `begin` made."""
        self.model.generation_config = generation_config(self.model, self.tokenizer)
        self.model.save_pretrained(unfinished, state_dict=self.weights)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(unfinished)
        if self.state is not None:
            torch.save(self.state, unfinished / STATE_FILE)


def generation_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> GenerationConfig:
    """The model's, with every token that ended responses, so that `generate` ends there too; and
    without what transformers refuses to save: settings of sampling in one that does not sample."""
    found = copy.deepcopy(model.generation_config)
    found._from_model_config = False  # else transformers may make it anew, of config.json
    if not found.do_sample:
        for name in _OF_SAMPLING:
            setattr(found, name, None)
    if tokenizer is None:
        return found
    found.eos_token_id, *others = sorted(stop_token_ids(model, tokenizer))
    if others:
        found.eos_token_id = [found.eos_token_id, *others]
    return found


_OF_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "top_h"),
    *("typical_p", "epsilon_cutoff", "eta_cutoff"),
)


def begin(directory: Path) -> Path:
    """Make the directory that is to become `directory`, empty."""
    unfinished = directory.with_name(directory.name + UNFINISHED)
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    return unfinished


def finish(unfinished: Path, directory: Path) -> None:
    """Have all of it on the disk, then give it its name; one that has the name is replaced."""
    for path in (*unfinished.rglob("*"), unfinished):
        flush(path)
    if directory.exists():
        shutil.rmtree(directory)
    unfinished.rename(directory)
    flush(directory.parent)


def snapshot(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    state: dict[str, Any] | None,
) -> Snapshot:
    """Copy what a checkpoint is to hold into main memory; tensors that share memory stay tied."""
    copies: dict[Any, Tensor] = {}
    weights = {name: _copy(tensor, copies) for name, tensor in model.state_dict().items()}
    return Snapshot(model, weights, tokenizer, _copy(state, copies))


def load(directory: Path, device: torch.device, *, mmap: bool = False) -> dict[str, Any]:
    """The state of the checkpoint in `directory`.

    With `mmap`, what is not looked at is not read.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    path = directory / STATE_FILE
    if is_sharded(directory):
        from rhymeflow.learner import sharded_checkpoint  # loads torch.distributed

        return sharded_checkpoint.load_whole(directory)
    if not path.is_file():
        raise UserError(f"{directory}: no checkpoint to resume from ({STATE_FILE} is missing)")
    try:
        return torch.load(path, map_location=device, weights_only=True, mmap=mmap)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, EOFError, pickle.UnpicklingError, OSError) as error:  # torch's, of a file
        raise unreadable(path, error) from error


def unreadable(path: Path, error: BaseException) -> UserError:
    """What is said of a checkpoint that is damaged."""
    reason = str(error).strip() or type(error).__name__
    return UserError(f"{path}: cannot be read: {reason.splitlines()[0]}")


def is_sharded(directory: Path) -> bool:
    """Whether many ranks wrote it."""
    return (directory / SHARDS).is_dir()


def remove_others(directory: Path, keep: Collection[Path]) -> None:
    """Delete the checkpoints in `directory` that are not in `keep`, and what was left unfinished.

    A checkpoint is renamed first, so that one that is half deleted has no final name.
    """
    for path in directory.glob("step-*"):
        if path in keep:
            continue
        if not path.name.endswith(UNFINISHED):
            path = path.rename(path.with_name(path.name + UNFINISHED))
        shutil.rmtree(path)


def _copy(value: Any, copies: dict[Any, Tensor]) -> Any:
    """The value with each tensor in it copied once."""
    match value:
        case Tensor():
            place = (value.device, value.data_ptr(), value.shape, value.dtype)
            if value.numel() == 0 or place not in copies:
                copies[place] = value.detach().to("cpu", copy=True)
            return copies[place]
        case dict():
            return {key: _copy(item, copies) for key, item in value.items()}
        case list() | tuple():
            return type(value)(_copy(item, copies) for item in value)
        case _:
            return value


__all__ = [
    "Snapshot",
    "begin",
    "finish",
    "generation_config",
    "is_sharded",
    "load",
    "remove_others",
    "snapshot",
]
