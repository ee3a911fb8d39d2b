"""`rhymeflow export --merged`: writes the model of a run that trained an adapter, as plain weights.

The adapter is added to the weights in float32, which are then rounded once. In bfloat16 the result
is near to what was trained, not the same: see docs/lora.md."""

from __future__ import annotations

from pathlib import Path

import torch

from rhymeflow.config import ModelConfig
from rhymeflow.errors import UserError
from rhymeflow.learner import checkpoint
from rhymeflow.models.adapter_files import is_adapter
from rhymeflow.models.buffers import buffers_of
from rhymeflow.models.load import load_config
from rhymeflow.models.lora import load_policy, merge
from rhymeflow.models.tokenizer import load_tokenizer
from rhymeflow.store.checkpoint_dirs import CheckpointDir, newest_of
from rhymeflow.utils.disk import check_writable


def write_merged(run: Path, output: Path) -> Path:
    """Write the merged model to the directory `output`; return that of its adapter, the run's
    newest checkpoint or `run` itself. Raises `UserError` if there is none, or `output` exists."""
    if output.exists():
        raise UserError(f"--output {output}: is there already; name another")
    check_writable(output, "--output")
    adapter = _adapter_of(run)
    config = ModelConfig(name=str(adapter), device="cpu")
    stored = load_config(config).dtype or torch.float32
    dtype: torch.dtype = getattr(torch, str(stored).removeprefix("torch."))
    model = merge(load_policy(config, dtype=dtype, device=torch.device("cpu")))
    made = CheckpointDir(output)
    made.begin()
    parameters, buffers = dict(model.named_parameters()), buffers_of(model)
    tokenizer = load_tokenizer(config)
    checkpoint.export(made, model, tokenizer, dtype, buffers, [parameters])
    made.finish()
    return adapter


def _adapter_of(run: Path) -> Path:
    if is_adapter(run):
        return run
    newest = newest_of(run)
    if newest is None:
        raise UserError(f"{run}: holds neither an adapter nor a checkpoint of a run")
    if not is_adapter(newest):
        raise UserError(f"--merged: {newest} holds a model already, and no adapter")
    return newest
