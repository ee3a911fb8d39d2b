"""A checkpoint directory: a plain Hugging Face model, its tokenizer, and the learner's state.

    config.json, generation_config.json, tokenizer, model.safetensors (several ranks: one per block)
    learner/                 master weights and AdamW's moments, by `torch.distributed.checkpoint`;
                             a critic's too
    learner/progress.json    version, token count, optimizer steps

Each rank writes its rows of the state; any number of ranks can read them. transformers loads the
rest. A directory under its final name is complete, even after a loss of power."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Shard
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from rhymeflow.core.types import Version
from rhymeflow.errors import StorageError, UserError
from rhymeflow.learner.optimizer import Optimizer
from rhymeflow.learner.ranks import Gathering, Ranks
from rhymeflow.models.adapter_files import WEIGHTS
from rhymeflow.models.buffers import buffers_of
from rhymeflow.models.load import stop_token_ids
from rhymeflow.models.lora import adapter_in, save_adapter, versioned
from rhymeflow.store.checkpoint_dirs import CheckpointDir, CheckpointPlace, is_url
from rhymeflow.utils.storage import Unreachable

LEARNER, PROGRESS, STEPS = "learner", "progress.json", "optimizer_steps"
_DAMAGE = (EOFError, ValueError, LookupError, RuntimeError, pickle.UnpicklingError)
"""Errors of reading what is not what was written."""

# A learner of one rank is one process on purpose.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or")


class LearnerCopy:
    """A copy in main memory of one rank's rows of a checkpoint, at one version."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        optimizers: Mapping[str, Optimizer],
        progress: dict[str, int],
        dtype: torch.dtype,
        ranks: Ranks,
    ) -> None:
        """Copy the rows; training may continue while they are written. `dtype` is that of the
        Hugging Face model; `optimizers` are by what names of their state begin with, the policy's
        by ""."""
        # The model is used for its class and configuration: parameters may change before `write`.
        self._model, self._tokenizer, self._ranks, self._dtype = model, tokenizer, ranks, dtype
        steps = {f"{whose}{STEPS}": each.num_steps for whose, each in optimizers.items()}
        self._progress = {**progress, **steps}
        self._state = {
            f"{whose}{name}": _distributed(rows.to("cpu", copy=True), parameter, ranks)
            for whose, optimizer in optimizers.items()
            for name, parameter, rows in optimizer.state()
        }
        exported = {
            name: self._state[f"master.{name}"]
            if each.requires_grad
            else ranks.local(each).to("cpu", copy=True)
            for name, each in versioned(model).items()
        }
        self._weights = Gathering(
            model, lambda name: ranks.local(exported[name]), dtype, ranks, ranks.saving
        )
        buffers = {} if adapter_in(model) else buffers_of(model)  # an adapter's files have none
        self._buffers = {name: each.to("cpu", copy=True) for name, each in buffers.items()}

    def write(self, checkpoint: CheckpointDir) -> None:
        """Write everything, so that `checkpoint` is complete. A collective of all ranks.

        Raises:
            OSError: a rank cannot write; raised on all ranks, and nothing is left on the disk.
            RuntimeError: a rank is gone."""
        try:
            self._on_lead(checkpoint.begin)
            self._write_state(checkpoint)
            blocks, count = self._weights.blocks(), self._weights.num_blocks
            source = self._model, self._tokenizer, self._dtype, self._buffers, blocks, count
            self._on_lead(lambda: export(checkpoint, *source), blocks)
            self._on_lead(checkpoint.finish)
        except OSError:
            if self._ranks.is_lead:  # the disk may be full
                checkpoint.abandon()
            raise

    def _write_state(self, checkpoint: CheckpointDir) -> None:
        group, is_alone = self._ranks.saving, self._ranks.count == 1
        shards = f"{checkpoint.target}/{LEARNER}"
        try:
            state_dict_saver.save(
                self._state, checkpoint_id=shards, process_group=group, no_dist=is_alone
            )
        except CheckpointException as error:  # raised alike on all ranks
            rank, (reason, _) = min(error.failures.items())
            raise OSError(str(reason) if is_alone else f"rank {rank}: {reason}") from error
        self._on_lead(lambda: self._write_progress(checkpoint.files / LEARNER))

    def _write_progress(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        (directory / PROGRESS).write_text(json.dumps(self._progress))

    def _on_lead(self, work: Callable[[], Any], blocks: Iterable[Any] = ()) -> None:
        """Run `work` on rank 0, which reads `blocks` that all ranks gather; raise its disk errors
        on all ranks, as `OSError`."""
        problem = None
        if self._ranks.is_lead:
            try:
                work()
            except (OSError, SafetensorError, StorageError) as error:
                problem = str(error)
        for _ in blocks:  # on rank 0, those that `work` did not read
            pass
        if (message := self._ranks.broadcast(problem)) is not None:
            raise OSError(message)


def export(
    checkpoint: CheckpointDir,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: torch.dtype,
    buffers: Mapping[str, Tensor],
    blocks: Iterable[Mapping[str, Tensor]],
    count: int = 1,
) -> None:
    """Write the files of a Hugging Face model, with one weights file for each of `count` blocks, or
    if the model has an adapter, the files of that: `blocks` are then its parameters. Tensors have
    the names that the model's family has in files; buffers are in the first file."""
    directory = checkpoint.files
    if (adapter := adapter_in(model)) is not None:
        tensors = {name: each for block in blocks for name, each in block.items()}
        save_adapter(directory, adapter, str(model.name_or_path), tensors)
        checkpoint.written(directory / WEIGHTS)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
        return
    config = copy.deepcopy(model.config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    generation_config(model, tokenizer).save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    weight_map, num_bytes = dict[str, str](), 0
    for number, block in enumerate(blocks, 1):
        name = f"model-{number:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors"
        whole = {**buffers, **block} if number == 1 else block
        tensors = {name: each.detach().contiguous() for name, each in whole.items()}
        tensors = revert_weight_conversion(model, tensors)
        save_file(tensors, directory / name, metadata={"format": "pt"})
        checkpoint.written(directory / name)
        weight_map |= dict.fromkeys(tensors, name)
        num_bytes += sum(each.nbytes for each in tensors.values())
    if count > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def generation_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> GenerationConfig:
    """Return the model's generation config with all stop tokens, and without sampling options if it
    does not sample: transformers would refuse to save them."""
    config = copy.deepcopy(model.generation_config)
    config._from_model_config = False  # else transformers may rebuild it from config.json
    if not config.do_sample:
        for name in _SAMPLING_OPTIONS:
            setattr(config, name, None)
    if tokenizer is None:
        return config
    config.eos_token_id, *others = sorted(stop_token_ids(model, tokenizer))
    if others:
        config.eos_token_id = [config.eos_token_id, *others]
    return config


_SAMPLING_OPTIONS = (
    *("temperature", "top_k", "top_p", "min_p", "top_h"),
    *("typical_p", "epsilon_cutoff", "eta_cutoff"),
)


def load(
    checkpoint: CheckpointDir, optimizers: Mapping[str, Optimizer], ranks: Ranks
) -> dict[str, int]:
    """Load this rank's rows from a checkpoint; return its `progress.json`. Leaves the optimizers
    unchanged and raises `UserError` if it is damaged, `Unreachable` if its storage fails."""
    progress = checkpoint.counts(f"{LEARNER}/{PROGRESS}")
    state = {
        f"{whose}{name}": _distributed(torch.empty(rows.shape), parameter, ranks)
        for whose, optimizer in optimizers.items()
        for name, parameter, rows in optimizer.state()
    }
    is_alone = ranks.count == 1
    try:
        shards = f"{checkpoint}/{LEARNER}"
        state_dict_loader.load(
            state, checkpoint_id=shards, process_group=ranks.saving, no_dist=is_alone
        )
    except (CheckpointException, OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
        reason: BaseException = error
        if isinstance(error, CheckpointException):  # raised alike on all ranks
            _, (reason, _) = min(error.failures.items())
        message = (str(reason).strip() or type(reason).__name__).splitlines()[0]
        # An error of a disk is a damaged file. One of an object store is the network's.
        is_damage = isinstance(reason, _DAMAGE) or not is_url(str(checkpoint))
        fault = UserError if is_damage else Unreachable
        raise fault(f"{checkpoint}: cannot be read: {message}") from error
    rows = {name: ranks.local(each) for name, each in state.items()}
    for whose, optimizer in optimizers.items():
        own = {n.removeprefix(whose): each for n, each in rows.items() if n.startswith(whose)}
        optimizer.load(progress[f"{whose}{STEPS}"], own)
    return progress


def _distributed(rows: Tensor, like: Tensor, ranks: Ranks) -> Tensor:
    """Return a rank's rows as a DTensor shaped as `like`, or as they are if there is one rank."""
    if ranks.count == 1:
        return rows
    return DTensor.from_local(
        rows, ranks.cpu_mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride()
    )


# -- Writing in the background ---------------------------------------------------------------------


class Saved(NamedTuple):
    """A checkpoint in `path`, or the `error` because of which it could not be written."""

    version: Version
    path: str
    error: str | None


class Saver:
    """Writes checkpoints in a thread, one at a time, so that the learner only waits for a copy.
    Each is complete or absent; rank 0 deletes older ones after a newer one is complete."""

    def __init__(self, place: CheckpointPlace, *, is_lead: bool = True) -> None:
        self._place, self._is_lead = place, is_lead
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._pending: deque[Future[Saved]] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether there is a checkpoint that `ended` has not returned yet."""
        return bool(self._pending)

    def begin(self, version: Version, snapshot: LearnerCopy, keep: Collection[Version]) -> None:
        """Write `snapshot`; then delete all other checkpoints except those of versions `keep`."""
        self._pending.append(self._thread.submit(self._write, version, snapshot, keep))

    def ended(self) -> list[Saved]:
        """Return the checkpoints that ended since the last call, without waiting. Raises
        `RuntimeError` if another rank is gone; the checkpoint may then be complete or absent."""
        ended = []
        while self._pending and self._pending[0].done():
            ended.append(self._pending.popleft().result())
        return ended

    def _write(self, version: Version, snapshot: LearnerCopy, keep: Collection[Version]) -> Saved:
        checkpoint = self._place.at(version)
        try:
            snapshot.write(checkpoint)
            if self._is_lead:
                self._place.remove_others({version, *keep})
        except (OSError, StorageError) as error:
            return Saved(version, str(checkpoint), str(error).splitlines()[0])
        return Saved(version, str(checkpoint), None)
