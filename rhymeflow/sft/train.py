"""`rhymeflow sft`: fine-tunes a model on rows and writes a Hugging Face checkpoint.

Every row is read and encoded before the first step, so a bad row is reported at once. The same
configuration gives the same batches."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rhymeflow.config import Config, DataConfig, RolloutConfig
from rhymeflow.config.fields import as_written
from rhymeflow.data.files import check_source
from rhymeflow.data.generators import is_generator
from rhymeflow.data.load import GENERATED_COLUMN, load_rows
from rhymeflow.data.stream import order
from rhymeflow.environments.template import load_settled
from rhymeflow.errors import UserError
from rhymeflow.learner import checkpoint
from rhymeflow.learner.learner import Learner
from rhymeflow.learner.optimizer import learning_rate
from rhymeflow.learner.packing import PackedRow, pack
from rhymeflow.learner.sample import Sample
from rhymeflow.models.adapter_files import check_trained
from rhymeflow.models.buffers import buffers_of
from rhymeflow.models.load import configured_stop_token_ids, random_model, resolve_dtype
from rhymeflow.models.lora import load_policy, versioned
from rhymeflow.models.precision import resolve_device
from rhymeflow.models.rope import fix_longrope
from rhymeflow.models.source import check_files
from rhymeflow.models.tokenizer import max_length
from rhymeflow.sft.rows import RowEncoder
from rhymeflow.store.checkpoint_dirs import CheckpointDir
from rhymeflow.utils.consecutive_failures import ConsecutiveFailures
from rhymeflow.utils.disk import check_writable, make_directory, remove_if_empty

LOGGING_STEPS = 10  # steps between two reports of the loss

ORIGIN = "warm_start.json"
"""File beside the weights with the seed, the number of steps, the held-out loss and the digest."""


class SupervisedLearner(Learner):
    """Trains with cross-entropy on samples; tokens marked as observed are not in the loss. The loss
    is the mean over a batch's learnt tokens, however it is split into micro-batches."""

    def fit(self, batch: Sequence[Sample], step: int) -> dict[str, float]:
        """Take optimizer step `step`, from 0, on a batch; return the metrics. A step whose gradient
        is not finite is skipped: see `skipped`."""
        num_learnt = _num_learnt(batch)

        def loss_of(logprob_C: Tensor, chunk: slice) -> Tensor:
            return -logprob_C.sum() / num_learnt

        logprob = sum(float(self._policy.backward(r, loss_of)[0].sum()) for r in self._pack(batch))
        rate = learning_rate(step, self._config)
        norm = self._optimizer.step(rate)
        self.skipped = {0: self._optimizer.skipped} if self._optimizer.skipped else {}
        self.version = step + 1
        self.num_tokens += sum(len(s.prompt_ids) + len(s.completion_ids) for s in batch)
        return {
            "loss": -logprob / num_learnt,
            "grad_norm": norm,
            "learning_rate": rate,
            "num_tokens": float(self.num_tokens),
        }

    def loss(self, samples: Sequence[Sample]) -> float:
        """Return the loss of samples, without training: the mean over learnt tokens."""
        logprob = sum(float(self._policy.score(row)[0].sum()) for row in self._pack(samples))
        return -logprob / _num_learnt(samples)

    def _pack(self, samples: Sequence[Sample]) -> list[PackedRow]:
        most, counts_copies = self._config.max_tokens_per_microbatch, self._counts_copies
        return pack(samples, range(len(samples)), most, counts_copies=counts_copies)


def _num_learnt(samples: Sequence[Sample]) -> int:
    return sum(sample.num_sampled for sample in samples)


def train(config: Config, say: Callable[[str], None]) -> Path:
    """Fine-tune as section `sft` says; return the checkpoint's directory. `say` gets progress."""
    config = as_written(config, "Config")
    directory = check(config)
    try:  # at once, so that no other process takes it
        created = make_directory(directory, exist_ok=False)
    except FileExistsError:
        raise UserError(f"sft.output_dir: {directory} is there already; name another") from None
    try:
        _train(config, say, directory)
    except BaseException:
        remove_if_empty(created)
        raise
    return directory


def _train(config: Config, say: Callable[[str], None], directory: Path) -> None:
    if config.learner.num_threads is not None:
        torch.set_num_threads(config.learner.num_threads)
    tokenizer, settled = load_settled(config)
    if settled is not None:
        say(settled)
    samples, held_out = load(config, tokenizer)
    learner = _learner(config, tokenizer)
    tokens = sum(len(s.prompt_ids) + len(s.completion_ids) for s in samples)
    say(
        f"{len(samples):,} rows of {tokens:,} tokens, {len(held_out):,} held out; "
        f"{learner.num_parameters:,} parameters"
    )
    if held_out:
        say(f"held-out loss before: {learner.loss(held_out):.4f}")
    _fit(learner, samples, config, say)
    eval_loss = learner.loss(held_out) if held_out else None
    if eval_loss is not None:
        say(f"held-out loss: {eval_loss:.4f}")
    _save(learner.model, tokenizer, config, directory, eval_loss)
    say(f"checkpoint: {directory}")


def check(config: Config) -> Path:
    """Check what needs no loading; return the checkpoint's directory. Raises `UserError` if the
    directory exists or cannot be written, or the configuration or the model is wrong."""
    directory = Path(config.sft.output_dir or f"runs/{config.name}-sft").expanduser()
    if directory.exists():
        raise UserError(f"sft.output_dir: {directory} is there already; name another")
    check_writable(directory, "sft.output_dir")
    if config.learner.num_ranks > 1:
        raise UserError(f"learner.num_ranks = {config.learner.num_ranks}: sft is one process")
    check_trained(config.model)
    if config.model.lora.is_used and config.sft.init == "config":
        raise UserError("model.lora: needs a model's weights, not sft.init = 'config'")
    if config.sft.init == "weights":
        check_files(config.model)
    return directory


def load(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Sample], list[Sample]]:
    """Read and encode all rows; return the training and the held-out samples."""
    data = _data(config)
    stops = configured_stop_token_ids(config.model, tokenizer)
    encoder = RowEncoder(tokenizer, data, config.sft, stops, max_length(config.model))
    rows, held_out = load_rows(data, config.run.seed)
    return [encoder.encode(row) for row in rows], [encoder.encode(row) for row in held_out]


def batches(
    samples: Sequence[Sample], tokens: int, seed: int, *, shuffle: bool
) -> Iterator[list[Sample]]:
    """Yield batches without end, epoch after epoch; a batch is full at `tokens` tokens."""
    epoch, batch, size = 0, list[Sample](), 0
    while True:
        for index in order(len(samples), seed, epoch) if shuffle else range(len(samples)):
            batch.append(samples[index])
            size += len(batch[-1].prompt_ids) + len(batch[-1].completion_ids)
            if size >= tokens:
                yield batch
                batch, size = [], 0
        epoch += 1


_DIGESTED = ("config.json", "adapter_config.json", "tokenizer.json")


def digest(directory: Path) -> str:
    """Return the SHA-256 of a checkpoint directory's configuration, weights and tokenizer."""
    content = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.name in _DIGESTED or path.suffix == ".safetensors":
            content.update(path.read_bytes())
    return content.hexdigest()


def _data(config: Config) -> DataConfig:
    """Return section `data` with the source of section `sft`, if it has one."""
    data, sft = config.data, config.sft
    if sft.source is None:
        if sft.size is not None or sft.eval_size is not None:
            raise UserError("sft.size, sft.eval_size: belong to sft.source, which is not given")
    elif is_generator(sft.source) and sft.size is None:
        raise UserError(f"sft.size: {sft.source} makes rows; say how many")
    else:
        if not is_generator(sft.source):
            check_source(Path(sft.source), "sft.source")
        source = {"source": sft.source, "size": sft.size, "eval_size": sft.eval_size}
        data = data.model_copy(update={**source, "eval_source": None, "options": {}})
    if is_generator(data.source):
        data = data.model_copy(update={"prompt_column": GENERATED_COLUMN})
    return data


def _learner(config: Config, tokenizer: PreTrainedTokenizerBase) -> SupervisedLearner:
    device = resolve_device(config.model)
    compute_dtype = resolve_dtype(config.model, device)
    # In float32, so that the master weights are exact.
    if config.sft.init == "config":
        model = random_model(config.model, dtype=torch.float32, device=device, seed=config.run.seed)
    else:
        dtype = compute_dtype if config.model.lora.is_used else torch.float32
        model = load_policy(config.model, dtype=dtype, device=device, seed=config.run.seed)
    names = ("max_steps", "learning_rate", "lr_scheduler_type", "min_lr_rate", "warmup_steps")
    changes = {name: getattr(config.sft, name) for name in names}
    changes |= {"beta": 0.0, "advantage": "group_mean"}  # no reference, no critic
    learner, model = config.learner.model_copy(update=changes), fix_longrope(model, config)
    # The default `RolloutConfig` has temperature 1: the loss is that of the model's distribution.
    return SupervisedLearner(model, tokenizer, learner, RolloutConfig(), compute_dtype)


def _fit(
    learner: SupervisedLearner, samples: list[Sample], config: Config, say: Callable[[str], None]
) -> None:
    sft, shuffle = config.sft, config.data.shuffle
    stream = batches(samples, sft.tokens_per_batch, config.run.seed, shuffle=shuffle)
    losses: list[float] = []
    skips = ConsecutiveFailures(
        config.learner.max_skipped_steps, "learner.max_skipped_steps", "steps"
    )
    began, tokens = time.perf_counter(), 0.0
    for step in range(sft.max_steps):
        metrics = learner.fit(next(stream), step)
        skips.count(reason := learner.skipped.get(0))
        if reason:
            say(f"step {step + 1:,} is skipped: {reason}")
        losses.append(metrics["loss"])
        if (step + 1) % LOGGING_STEPS == 0 or step + 1 == sft.max_steps:
            now = time.perf_counter()
            say(
                f"step {step + 1:,}/{sft.max_steps:,}  loss {sum(losses) / len(losses):.4f}  "
                f"learning rate {metrics['learning_rate']:.2e}  "
                f"{(metrics['num_tokens'] - tokens) / (now - began):,.0f} tokens/s"
            )
            losses, began, tokens = [], now, metrics["num_tokens"]


def _save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: Config,
    directory: Path,
    eval_loss: float | None,
) -> None:
    if config.sft.save_dtype == "bfloat16":
        model.bfloat16()
    saved = CheckpointDir(directory)
    saved.begin()
    parameters, buffers = versioned(model), buffers_of(model)
    checkpoint.export(saved, model, tokenizer, model.dtype, buffers, [parameters])
    origin = {
        "seed": config.run.seed,
        "steps": config.sft.max_steps,
        "eval_loss": eval_loss and round(eval_loss, 4),
        "sha256": digest(saved.files),
    }
    (saved.files / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n")
    saved.finish()
