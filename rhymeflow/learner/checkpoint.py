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
from rhymeflow.learner.optimizer import MOMENTS, Optimizer
from rhymeflow.learner.ranks import Gathering, Ranks
from rhymeflow.models.load import stop_token_ids
from rhymeflow.store.checkpoint_dirs import UNFINISHED
from rhymeflow.utils.disk import flush

LEARNER, PROGRESS = "learner", "progress.json"
KINDS = ("master", *MOMENTS)

# That a learner of one rank is one process is meant.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or")


class Snapshot(NamedTuple):
    """One rank's rows of all that a checkpoint holds, in main memory, at one version."""

    model: PreTrainedModel
    """For its class and configuration; its parameters may have changed since."""
    tokenizer: PreTrainedTokenizerBase | None
    progress: dict[str, int]
    state: dict[str, Tensor]
    """By kind and name."""
    weights: Gathering
    """In compute precision."""
    buffers: dict[str, Tensor]
    ranks: Ranks

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        optimizer: Optimizer,
        progress: dict[str, int],
        dtype: torch.dtype,
        ranks: Ranks,
    ) -> Snapshot:
        """Copy this rank's rows; training may go on while they are written."""
        copies = {(kind, name): each.to("cpu", copy=True) for kind, name, each in optimizer.state()}
        parameters = dict(model.named_parameters())
        rows = {
            name: copies["master", name]
            if ("master", name) in copies
            else ranks.local(each).to("cpu", copy=True)  # it is frozen
            for name, each in parameters.items()
        }
        weights = Gathering(model, rows.__getitem__, dtype, ranks, ranks.saving)
        state = {
            f"{kind}.{name}": _distributed(each, parameters[name], ranks)
            for (kind, name), each in copies.items()
        }
        buffers = {name: each.to("cpu", copy=True) for name, each in buffers_of(model).items()}
        progress = {**progress, "optimizer_steps": optimizer.num_steps}
        return cls(model, tokenizer, progress, state, weights, buffers, ranks)

    def write(self, directory: Path) -> None:
        """Write everything beside `directory` and put it in place with one rename.

        Every rank has to call this. If one of them cannot write, all raise `OSError`, and nothing
        is left of it; if one is gone, `RuntimeError`.
        """
        unfinished = directory.with_name(directory.name + UNFINISHED)
        try:
            self._on_lead(lambda: begin(directory))
            self._write_state(unfinished / LEARNER)
            self._export(unfinished)
            self._on_lead(lambda: finish(unfinished, directory))
        except OSError:
            if self.ranks.is_lead:  # on a full disk what there is of it would only be in the way
                shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def _write_state(self, directory: Path) -> None:
        group, is_alone = self.ranks.saving, self.ranks.count == 1
        try:
            state_dict_saver.save(
                self.state, checkpoint_id=directory, process_group=group, no_dist=is_alone
            )
        except CheckpointException as error:  # it is the same on all ranks
            rank, (reason, _) = min(error.failures.items())
            raise OSError(str(reason) if is_alone else f"rank {rank}: {reason}") from error
        progress = json.dumps(self.progress)
        self._on_lead(lambda: (directory / PROGRESS).write_text(progress))

    def _export(self, directory: Path) -> None:
        blocks, problem = self.weights.blocks(), None
        if self.ranks.is_lead:
            given = directory, self.model, self.tokenizer, self.weights.dtype, blocks, self.buffers
            problem = _problem(lambda: export(*given))
        for _ in blocks:  # what is left of them is gathered for the others' sake
            pass
        self._on_lead(lambda: None, problem)

    def _on_lead(self, work: Callable[[], Any], problem: str | None = None) -> None:
        """Have rank 0 do something, if it has no problem yet; raise one of the disk on all."""
        if self.ranks.is_lead and problem is None:
            problem = _problem(work)
        if (said := self.ranks.told(problem)) is not None:
            raise OSError(said)


def export(
    directory: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: torch.dtype,
    blocks: Iterable[Mapping[str, Tensor]],
    buffers: Mapping[str, Tensor],
) -> None:
    """Write a Hugging Face model directory, a file for each of the `blocks` of its weights.

    Names are those that the model's family has in files; buffers are in the first file.
    """
    config = copy.deepcopy(model.config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    generation_config(model, tokenizer).save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    files: list[list[str]] = []
    num_bytes = 0
    for block in blocks:
        whole = block if files else {**buffers, **block}
        tensors = {name: each.detach().contiguous() for name, each in whole.items()}
        tensors = revert_weight_conversion(model, tensors)
        save_file(tensors, directory / f"block-{len(files):05}", metadata={"format": "pt"})
        files.append(list(tensors))
        num_bytes += sum(each.nbytes for each in tensors.values())
    weight_map = dict[str, str]()
    for number, names in enumerate(files):  # how many there are is part of their names
        final = f"model-{number + 1:05}-of-{len(files):05}" if len(files) > 1 else "model"
        weight_map |= dict.fromkeys(names, f"{final}.safetensors")
        (directory / f"block-{number:05}").rename(directory / f"{final}.safetensors")
    if len(files) > 1:
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
        f"{kind}.{name}": _distributed(torch.empty(rows.shape), parameter, ranks)
        for name, (parameter, rows) in optimizer.trained().items()
        for kind in KINDS
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
        progress["optimizer_steps"], lambda kind, name: ranks.local(state[f"{kind}.{name}"])
    )
    return progress


def _distributed(rows: Tensor, like: Tensor, ranks: Ranks) -> Tensor:
    """A rank's rows as part of a tensor as `like`; alone they are the tensor."""
    if ranks.count == 1:
        return rows
    return DTensor.from_local(
        rows, ranks.cpu_mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride()
    )


def _problem(work: Callable[[], Any]) -> str | None:
    """Do it; what went wrong with the disk, if anything did."""
    try:
        work()
    except (OSError, SafetensorError) as error:
        return str(error)
    return None


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

    def begin(self, version: Version, snapshot: Snapshot, keep: Collection[Version]) -> None:
        """Write `snapshot`; then delete all checkpoints but it and those of versions `keep`."""
        self._pending.append(self._thread.submit(self._write, version, snapshot, keep))

    def ended(self) -> list[Saved]:
        """What became of checkpoints since this was last asked. Does not wait."""
        found = []
        while self._pending and self._pending[0].done():
            found.append(self._pending.popleft().result())
        return found

    def _write(self, version: Version, snapshot: Snapshot, keep: Collection[Version]) -> Saved:
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
