"""The worker in the learner's place where nothing is trained: publishes a model's weights once."""

from __future__ import annotations

from pathlib import Path

import torch

from rhymeflow.config import Config
from rhymeflow.core.events import LearnerReady
from rhymeflow.learner import published
from rhymeflow.learner.ranks import ALONE
from rhymeflow.models.adapter_files import adapter_for
from rhymeflow.models.frozen_base import FrozenBase
from rhymeflow.models.load import resolve_dtype
from rhymeflow.models.lora import adapter_in, load_policy
from rhymeflow.models.precision import resolve_device
from rhymeflow.utils import progress
from rhymeflow.weights.proof import as_text
from rhymeflow.weights.publish import make_store
from rhymeflow.workers.channel import Channel
from rhymeflow.workers.messages import Envelope, LoadedModel, Shutdown, receive, send


def main(connection: Channel, name: str, config: Config, run_dir: Path) -> None:
    """Publish the model as version 0, and hold its weights until `Shutdown`."""
    device = resolve_device(config.model)
    dtype = resolve_dtype(config.model, device)
    adapter = adapter_for(config.model)
    # Another device's weights of 4 bits may differ.
    where = device if adapter and adapter.quantization else torch.device("cpu")
    model = load_policy(config.model, dtype=dtype, device=where)
    base = None if adapter_in(model) is None else FrozenBase(model)
    weights = make_store(config, published.manifest_for(model, dtype, base), run_dir)
    try:
        checksum = weights.publish(0, published.rows(model, dtype, ALONE, base))
        loaded = LoadedModel(
            handle=weights.handle,
            device=device.type,
            dtype=str(dtype).removeprefix("torch."),
            max_length=model.config.get_text_config().max_position_embeddings,
            checkpoint_bytes=0,
        )
        del model
        send(connection, Envelope(LearnerReady(0, as_text(checksum)), loaded))
        progress.has_started = True
        while not isinstance(receive(connection), Shutdown):
            pass
    finally:
        weights.close()
