"""A checkpoint that many ranks write together, each its rows; any number of ranks reads it.

    config.json, generation_config.json, tokenizer files
    model-0000K-of-0000N.safetensors, model.safetensors.index.json    one file for each block
    learner/        master weights and AdamW's moments, by `torch.distributed.checkpoint`
    learner/progress.json    version, token count, optimizer steps

The Hugging Face files are gathered one block at a time by rank 0, so nobody has the whole model.

Holds true: as in `checkpoint.py`, a directory of the final name is complete, and a snapshot is a
copy, so training may go on while it is written, by a thread on each rank that talks in a group of
its own; if one rank cannot write, no directory appears, and all raise. Knows nothing of when a
checkpoint is due.
"""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from rhymeflow.errors import UserError
from rhymeflow.learner import checkpoint
from rhymeflow.learner.gathering import Gathering
from rhymeflow.learner.optimizer import decayed_first
from rhymeflow.learner.ranks import Ranks
from rhymeflow.learner.sharded_model import ShardedModel
from rhymeflow.learner.sharded_optimizer import MOMENTS, ShardedOptimizer

PROGRESS = "progress.json"
KINDS = ("master", *MOMENTS)


class ShardedSnapshot(NamedTuple):
    """One rank's rows of all that a checkpoint holds, in main memory."""

    model: PreTrainedModel
    """For its class and configuration."""
    tokenizer: PreTrainedTokenizerBase | None
    progress: dict[str, int]
    tensors: dict[str, DTensor]
    """By kind and name."""
    gathering: Gathering
    """Of the weights in compute precision."""
    compute_dtype: torch.dtype
    ranks: Ranks

    def write(self, directory: Path) -> None:
        """Write everything beside `directory` and put it in place with one rename.

        Every rank has to call this; it returns when the directory is there.

        Raises:
            OSError: on every rank: one of them could not write; nothing is left of it.
            RuntimeError: a rank is gone.
        """
        ranks = self.ranks
        problem = self._on_lead(lambda: checkpoint.begin(directory))
        unfinished = directory.with_name(directory.name + checkpoint.UNFINISHED)
        problem = problem or self._write_shards(unfinished / checkpoint.SHARDS)
        problem = problem or self._export(unfinished)
        problem = problem or self._on_lead(lambda: checkpoint.finish(unfinished, directory))
        if problem is not None:
            if ranks.is_lead:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise OSError(problem)

    def _write_shards(self, directory: Path) -> str | None:
        """What went wrong, on every rank."""
        try:
            dcp.save(self.tensors, checkpoint_id=directory, process_group=self.ranks.saving)
        except CheckpointException as error:  # it is the same on all ranks
            rank, (reason, _) = min(error.failures.items())
            return f"rank {rank}: {reason}"
        return None

    def _export(self, directory: Path) -> str | None:
        """Write what plain transformers loads."""
        exporting = _Export(directory, self.model, self.compute_dtype)
        problem = self._on_lead(lambda: exporting.begin(self.tokenizer, self.progress))
        if problem is None:
            for block in self.gathering:
                if self.ranks.is_lead and problem is None:  # else gathered for the others' sake
                    problem = _problem(lambda block=block: exporting.write(block))
            problem = self._told(problem or self._on_this(exporting.end))
        return problem

    def _on_this(self, work: Callable[[], Any]) -> str | None:
        return _problem(work) if self.ranks.is_lead else None

    def _on_lead(self, work: Callable[[], Any]) -> str | None:
        """Have rank 0 do something; what went wrong, on every rank."""
        return self._told(self._on_this(work))

    def _told(self, problem: str | None) -> str | None:
        said = [problem]
        dist.broadcast_object_list(said, 0, group=self.ranks.saving)
        return said[0]


class _Export:
    """A Hugging Face model directory, written block by block."""

    def __init__(self, directory: Path, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self._directory, self._model, self._dtype = directory, model, dtype
        self._files: dict[str, list[str]] = {}
        self._num_bytes = 0

    def begin(self, tokenizer: PreTrainedTokenizerBase | None, progress: dict[str, int]) -> None:
        """Everything but the weights."""
        config = self._model.config
        config.dtype = str(self._dtype).removeprefix("torch.")
        config.architectures = [type(self._model).__name__]
        config.save_pretrained(self._directory)
        generation = checkpoint.generation_config(self._model, tokenizer)
        generation.save_pretrained(self._directory)
        if tokenizer is not None:
            tokenizer.save_pretrained(self._directory)
        (self._directory / checkpoint.SHARDS / PROGRESS).write_text(json.dumps(progress))

    def write(self, block: dict[str, Tensor]) -> None:
        """Some of the weights, under the names that the model's family has in files."""
        tensors = {name: each.contiguous() for name, each in block.items()}
        tensors = revert_weight_conversion(self._model, tensors)
        name = f"block-{len(self._files) + 1:05}"
        save_file(tensors, self._directory / name, metadata={"format": "pt"})
        self._files[name] = list(tensors)
        self._num_bytes += sum(each.nbytes for each in tensors.values())

    def end(self) -> None:
        """Give the files their names, which say how many there are."""
        count = len(self._files)
        weight_map = {}
        for number, (name, tensors) in enumerate(self._files.items(), start=1):
            final = f"model-{number:05}-of-{count:05}.safetensors"
            (self._directory / name).rename(self._directory / final)
            weight_map |= dict.fromkeys(tensors, final)
        index = {"metadata": {"total_size": self._num_bytes}, "weight_map": weight_map}
        (self._directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def snapshot(
    sharded: ShardedModel,
    optimizer: ShardedOptimizer,
    tokenizer: PreTrainedTokenizerBase | None,
    progress: dict[str, int],
    ranks: Ranks,
) -> ShardedSnapshot:
    """Copy this rank's rows into main memory."""
    copies = {(kind, name): each.to("cpu", copy=True) for kind, name, each in optimizer.shards()}
    frozen = {
        name: sharded.shard(name).to("cpu", copy=True)
        for name in sharded.parameters
        if ("master", name) not in copies
    }
    shapes = {name: tuple(each.shape) for name, each in sharded.parameters.items()}
    tensors = {
        f"{kind}.{name}": _distributed(local, sharded.parameters[name], ranks)
        for (kind, name), local in copies.items()
    }
    gathering = Gathering(
        shapes,
        sharded.blocks(),
        lambda name: frozen[name] if name in frozen else copies["master", name],
        sharded.compute_dtype,
        ranks,
        ranks.saving,
    )
    return ShardedSnapshot(
        sharded.model, tokenizer, progress, tensors, gathering, sharded.compute_dtype, ranks
    )


def load(directory: Path, sharded: ShardedModel, optimizer: ShardedOptimizer) -> dict[str, int]:
    """Bring this rank's rows to the checkpoint in `directory`; return how far it had come.

    Raises:
        UserError: there is none.
    """
    if not checkpoint.is_sharded(directory):
        return _load_from_whole(directory, sharded, optimizer)
    ranks, parameters = sharded.ranks, sharded.parameters
    tensors = {
        f"{kind}.{name}": _distributed(
            torch.empty(each.to_local().shape, dtype=torch.float32), each, ranks
        )
        for name, each in parameters.items()
        if each.requires_grad
        for kind in KINDS
    }
    with _readable(directory):
        dcp.load(tensors, checkpoint_id=directory / checkpoint.SHARDS, process_group=ranks.saving)
    progress = _progress(directory)
    optimizer.load(
        progress["optimizer_steps"], lambda kind, name: tensors[f"{kind}.{name}"].to_local()
    )
    return progress


def load_whole(directory: Path) -> dict[str, Any]:
    """The state of a checkpoint of many ranks as one process takes it; see `checkpoint.load`."""
    shards = directory / checkpoint.SHARDS
    with _readable(directory):
        found = dcp.FileSystemReader(shards).read_metadata().state_dict_metadata
    tensors = {key: torch.empty(each.size, dtype=torch.float32) for key, each in found.items()}
    with _readable(directory), warnings.catch_warnings():  # that this is one process is meant
        warnings.simplefilter("ignore")
        dcp.load(tensors, checkpoint_id=shards, no_dist=True)
    progress = _progress(directory)
    by_kind: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
    for key, tensor in tensors.items():
        kind, _, name = key.partition(".")
        by_kind[kind][name] = tensor
    step = float(progress["optimizer_steps"])
    moments = {
        name: {"step": torch.tensor(step), **{kind: by_kind[kind][name] for kind in MOMENTS}}
        for name in by_kind["master"]
    }
    return {**progress, "optimizer": {"masters": by_kind["master"], "moments": moments}}


def _load_from_whole(
    directory: Path, sharded: ShardedModel, optimizer: ShardedOptimizer
) -> dict[str, int]:
    """From the file of one process, of which only this rank's rows are read."""
    state = checkpoint.load(directory, torch.device("cpu"), mmap=True)
    masters: Mapping[str, Tensor] = state["optimizer"]["masters"]
    moments = state["optimizer"]["adamw"]["state"]
    number = {name: i for i, name in enumerate(decayed_first(masters))}
    num_steps = int(next(iter(moments.values()))["step"]) if moments else 0

    def read(kind: str, name: str) -> Tensor:
        whole = masters[name] if kind == "master" else moments[number[name]][kind]
        return whole[sharded.ranks.rows(whole.shape[0])]

    optimizer.load(num_steps, read)
    return {"version": state["version"], "num_tokens": state["num_tokens"]}


def _progress(directory: Path) -> dict[str, int]:
    path = directory / checkpoint.SHARDS / PROGRESS
    if not path.is_file():
        raise UserError(f"{directory}: no checkpoint to resume from ({path.name} is missing)")
    with _readable(directory):
        progress: dict[str, int] = json.loads(path.read_text())
    return progress


@contextmanager
def _readable(directory: Path) -> Iterator[None]:
    """Raise `UserError`, on every rank, if files are damaged."""
    try:
        yield
    except CheckpointException as error:  # it is the same on all ranks
        _, (reason, _) = min(error.failures.items())
        raise checkpoint.unreadable(directory, reason) from error
    except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise checkpoint.unreadable(directory, error) from error


def _distributed(local: Tensor, like: DTensor, ranks: Ranks) -> DTensor:
    return DTensor.from_local(
        local,
        ranks.cpu_mesh,
        [Shard(0)],
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _problem(work: Callable[[], Any]) -> str | None:
    """Do it; what went wrong with the disk, if anything did."""
    try:
        work()
    except (OSError, SafetensorError) as error:
        return str(error)
    return None


__all__ = ["ShardedSnapshot", "load", "load_whole", "snapshot"]
