"""A checkpoint directory: a plain Hugging Face model, its tokenizer, and the learner's state.

    config.json, generation_config.json, model.safetensors (many ranks: a file a block), tokenizer
    learner/                 masters and AdamW's moments, by `torch.distributed.checkpoint`
    learner/progress.json    version, token count, optimizer steps

Each rank writes its rows of the state; any number of ranks reads them. Plain transformers loads the
rest. A directory of the final name is complete, also after a loss of power.
"""

from __future__ import annotations

import copy
import json
import pickle
import shutil
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
from rhymeflow.errors import UserError
from rhymeflow.learner.optimizer import Optimizer
from rhymeflow.learner.ranks import Gathering, Ranks
from rhymeflow.models.load import stop_token_ids
from rhymeflow.store.checkpoint_dirs import UNFINISHED
from rhymeflow.utils.disk import flush

LEARNER, PROGRESS = "learner", "progress.json"

# That a learner of one rank is one process is meant.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or")


class LearnerCopy:
    """One rank's rows of all that a checkpoint holds, in main memory, at one version."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        optimizer: Optimizer,
        progress: dict[str, int],
        dtype: torch.dtype,
        ranks: Ranks,
    ) -> None:
        """Copy them; training may go on while they are written, in `dtype` for others to load."""
        # For its class and configuration: its parameters may have changed when this is written.
        self._model, self._tokenizer, self._ranks, self._dtype = model, tokenizer, ranks, dtype
        self._progress = {**progress, "optimizer_steps": optimizer.num_steps}
        self._state = {
            name: _distributed(rows.to("cpu", copy=True), parameter, ranks)
            for name, parameter, rows in optimizer.state()
        }
        copied = {
            name: self._state[f"master.{name}"]
            if each.requires_grad
            else ranks.local(each).to("cpu", copy=True)
            for name, each in model.named_parameters()
        }
        self._weights = Gathering(
            model, lambda name: ranks.local(copied[name]), dtype, ranks, ranks.saving
        )
        buffers = buffers_of(model).items()
        self._buffers = {name: each.to("cpu", copy=True) for name, each in buffers}

    def write(self, directory: Path) -> None:
        """Write everything beside `directory` and put it in place with one rename.

        Every rank has to call this. If one of them cannot write, all raise `OSError`, and nothing
        is left of it; if one is gone, `RuntimeError`.
        """
        unfinished = directory.with_name(directory.name + UNFINISHED)
        try:
            self._on_lead(lambda: begin(directory))
            self._write_state(unfinished / LEARNER)
            blocks, count = self._weights.blocks(), self._weights.num_blocks
            given = self._model, self._tokenizer, self._dtype, self._buffers, blocks, count
            self._on_lead(lambda: export(unfinished, *given), blocks)
            self._on_lead(lambda: finish(unfinished, directory))
        except OSError:
            if self._ranks.is_lead:  # on a full disk what there is of it would only be in the way
                shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def _write_state(self, directory: Path) -> None:
        group, is_alone = self._ranks.saving, self._ranks.count == 1
        try:
            state_dict_saver.save(
                self._state, checkpoint_id=directory, process_group=group, no_dist=is_alone
            )
        except CheckpointException as error:  # it is the same on all ranks
            rank, (reason, _) = min(error.failures.items())
            raise OSError(str(reason) if is_alone else f"rank {rank}: {reason}") from error
        progress = json.dumps(self._progress)
        self._on_lead(lambda: (directory / PROGRESS).write_text(progress))

    def _on_lead(self, work: Callable[[], Any], blocks: Iterable[Any] = ()) -> None:
        """Have rank 0 do something, for which all gather `blocks`; raise a problem of the disk on
        all ranks."""
        problem = None
        if self._ranks.is_lead:
            try:
                work()
            except (OSError, SafetensorError) as error:
                problem = str(error)
        for _ in blocks:  # on rank 0 those that are left
            pass
        if (said := self._ranks.told(problem)) is not None:
            raise OSError(said)


def export(
    directory: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: torch.dtype,
    buffers: Mapping[str, Tensor],
    blocks: Iterable[Mapping[str, Tensor]],
    count: int = 1,
) -> None:
    """Write a Hugging Face model directory, a file for each of `count` blocks of its weights.

    Names are those that the model's family has in files; buffers are in the first file.
    """
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
        weight_map |= dict.fromkeys(tensors, name)
        num_bytes += sum(each.nbytes for each in tensors.values())
    if count > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def buffers_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """What a checkpoint of it has besides parameters."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: each for name, each in model.state_dict().items() if name not in parameters}


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


def load(directory: Path, optimizer: Optimizer, ranks: Ranks) -> dict[str, int]:
    """Bring this rank's rows to the checkpoint in `directory`; return how far it had come.

    After a `UserError` nothing has changed.
    """
    shards = directory / LEARNER
    if not (shards / PROGRESS).is_file():
        missing = f"{LEARNER}/{PROGRESS} is missing"
        raise UserError(f"{directory}: no checkpoint to resume from ({missing})")
    state = {
        name: _distributed(torch.empty(rows.shape), parameter, ranks)
        for name, parameter, rows in optimizer.state()
    }
    is_alone = ranks.count == 1
    try:
        progress: dict[str, int] = json.loads((shards / PROGRESS).read_text())
        state_dict_loader.load(
            state, checkpoint_id=shards, process_group=ranks.saving, no_dist=is_alone
        )
    except (CheckpointException, OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
        reason: BaseException = error
        if isinstance(error, CheckpointException):  # it is the same on all ranks
            _, (reason, _) = min(error.failures.items())
        said = (str(reason).strip() or type(reason).__name__).splitlines()[0]
        raise UserError(f"{directory}: cannot be read: {said}") from error
    optimizer.load(
        progress["optimizer_steps"], {name: ranks.local(each) for name, each in state.items()}
    )
    return progress


def _distributed(rows: Tensor, like: Tensor, ranks: Ranks) -> Tensor:
    """A rank's rows as part of a tensor as `like`; alone they are the tensor."""
    if ranks.count == 1:
        return rows
    return DTensor.from_local(
        rows, ranks.cpu_mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride()
    )


# -- Written in the background, one after the other ------------------------------------------------


class Saved(NamedTuple):
    """A checkpoint lies in `path`, or could not be written because of `error`."""

    version: Version
    path: Path
    error: str | None


class Saver:
    """Writes `directory/step-N` in a thread, so that the learner waits for a copy only.

    Each is complete or absent; rank 0 deletes older ones after a newer one is complete. `ended`
    raises `RuntimeError` if another rank is gone: nothing is known of the checkpoint then.
    """

    def __init__(self, directory: Path, *, is_lead: bool = True) -> None:
        self._directory, self._is_lead = directory, is_lead
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._pending: deque[Future[Saved]] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether there is a checkpoint whose end was not told yet."""
        return bool(self._pending)

    def begin(self, version: Version, snapshot: LearnerCopy, keep: Collection[Version]) -> None:
        """Write `snapshot`; then delete all checkpoints but it and those of versions `keep`."""
        self._pending.append(self._thread.submit(self._write, version, snapshot, keep))

    def ended(self) -> list[Saved]:
        """What became of checkpoints since this was last asked. Does not wait."""
        found = []
        while self._pending and self._pending[0].done():
            found.append(self._pending.popleft().result())
        return found

    def _write(self, version: Version, snapshot: LearnerCopy, keep: Collection[Version]) -> Saved:
        path, *kept = (self._directory / f"step-{each}" for each in (version, *keep))
        try:
            snapshot.write(path)
            if self._is_lead:
                remove_others(self._directory, {path, *kept})
        except OSError as error:
            return Saved(version, path, str(error).splitlines()[0])
        return Saved(version, path, None)


def remove_others(directory: Path, keep: Collection[Path]) -> None:
    """Delete the checkpoints in `directory` that are not to `keep`, and what is unfinished."""
    for path in directory.glob("step-*"):
        if path in keep:
            continue
        if not path.name.endswith(UNFINISHED):  # what is half deleted must not have its name
            path = path.rename(path.with_name(path.name + UNFINISHED))
        shutil.rmtree(path)
