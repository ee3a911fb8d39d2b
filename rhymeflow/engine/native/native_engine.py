"""The native `RolloutEngine`: a Hugging Face model in this process, on one device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rhymeflow.config import Config
from rhymeflow.core.types import Version
from rhymeflow.emulation import pace_of
from rhymeflow.engine.base import EngineLimits, Finished
from rhymeflow.engine.native.attention import attention_for
from rhymeflow.engine.native.engine import Engine
from rhymeflow.histospec.draft import IndexHandle
from rhymeflow.histospec.drafter import Drafter
from rhymeflow.models.adapter_files import adapter_for
from rhymeflow.models.attention import Shape
from rhymeflow.models.buffers import published_buffers
from rhymeflow.models.copies import CopyProof
from rhymeflow.models.frozen_base import NAME, FrozenBase, require_base, require_unchanged
from rhymeflow.models.load import (
    check_native,
    empty_model,
    load_config,
    resolve_dtype,
    stop_token_ids,
)
from rhymeflow.models.lora import adapter_in, draw_adapter, load_policy, versioned
from rhymeflow.models.precision import resolve_device
from rhymeflow.models.rope import fix_longrope
from rhymeflow.models.tokenizer import load_tokenizer
from rhymeflow.weights.base import WeightReader
from rhymeflow.weights.install import Installation
from rhymeflow.weights.manifest import manifest_of
from rhymeflow.weights.proof import ProvedWeights
from rhymeflow.weights.publish import row_digests


def load_kernels(config: Config) -> None:
    """Load the kernels that an engine will run; a machine's first run compiles them (seconds)."""
    check_native(config.model)
    device = resolve_device(config.model)
    dtype = resolve_dtype(config.model, device)
    attention_for(device, dtype, Shape.of(load_config(config.model)).head_dim)


def _model(config: Config, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Return the model to pull weights into: empty, or with an adapter what is under it."""
    if adapter_for(config.model) is None:
        return empty_model(config.model, dtype=dtype, device=device)
    return load_policy(config.model, dtype=dtype, device=device)


class NativeEngine(Engine):
    """A `base.RolloutEngine` that starts with the newest weights of `weights`. `drafter_for(index,
    max_length, stop_token_ids)` makes a drafter; `max_length` counts a prompt's and its response's
    tokens."""

    def __init__(
        self,
        config: Config,
        weights: WeightReader,
        *,
        instance: str,
        drafter_for: Callable[[IndexHandle, int, frozenset[int]], Drafter],
    ) -> None:
        rollout, device = config.rollout, resolve_device(config.model)
        dtype = resolve_dtype(config.model, device)
        model = fix_longrope(_model(config, dtype, device), config)
        self._drafter_for = drafter_for
        self._own: dict[str, Tensor] = dict(versioned(model))
        self._base = None if adapter_in(model) is None else FrozenBase(model)
        if self._base is None:
            self._weights = Installation(self._own | published_buffers(model, dtype))
            self._pulled = self._weights.pull(weights)
        else:
            self._learners_base = torch.zeros_like(self._base.checksum)
            self._weights = Installation(self._own | {NAME: self._learners_base})
            self._pulled = ProvedWeights(0, 0)  # is replaced below
            draw_adapter(model)  # the first version's may be zero, and prove nothing
        context = model.config.get_text_config().max_position_embeddings
        capacity = rollout.max_kv_tokens or rollout.max_num_seqs * context
        super().__init__(
            model,
            seed=config.run.seed,
            max_num_seqs=rollout.max_num_seqs,
            max_prefill_tokens=rollout.max_prefill_tokens,
            instance=instance,
            version=self._pulled.version,
            kv_capacity=capacity,
        )
        self._copies = CopyProof(model, self._lm_head, self._body)
        self.prove()
        self._copies.require_all()
        if self._base is not None:
            self._pulled = self._weights.pull(weights)
            require_base(self._learners_base, self._base.checksum)
            self.set_version(self._pulled.version, keep_cache=False)
            self._copies.require_next()
        self.pace = pace_of(config)
        stop_ids = stop_token_ids(model, load_tokenizer(config.model))
        self._limits = EngineLimits(rollout.max_num_seqs, self.max_length, capacity, stop_ids)

    @property
    def checksum(self) -> int:
        """See `base.RolloutEngine`."""
        return self._pulled.checksum

    def limits(self) -> EngineLimits:
        """See `base.RolloutEngine`."""
        return self._limits

    def poll(self, timeout: float) -> list[Finished]:
        """Run one iteration if any request runs or waits; `timeout` has no effect."""
        return self.step()

    def prepare(self, weights: WeightReader, want: Version) -> bool:
        """Fetch what changed; see `base.RolloutEngine`."""
        return weights.prepare(self._pulled, want)

    def install(self, weights: WeightReader, want: Version, *, keep_cache: bool) -> ProvedWeights:
        """Copy weights into the model; see `base.RolloutEngine`."""
        started = self.pace.now()
        if self._base is not None:
            held = self._weights.digests
            found = row_digests(manifest_of(self._own), self._own)
            require_unchanged({name: sum(held[name].values()) for name in self._own}, found)
            self._base.check_part()
            self._copies.require_adapter()
        self._pulled = self._weights.pull(weights, want)
        if self._base is not None:
            require_base(self._learners_base, self._base.checksum)
        self.set_version(self._pulled.version, keep_cache=keep_cache)
        self._copies.require_next()
        if self.pace.cost is not None:
            self.pace.hold(self.pace.cost.pull, started)
        return self._pulled

    def draft_from(self, index: IndexHandle) -> None:
        """Draft from this index; see `base.RolloutEngine`."""
        stops = self._limits.stop_token_ids
        self._drafting.use(self._drafter_for(index, self.max_length, stops))

    def close(self) -> None:
        """Do nothing: the process frees the model when it ends."""
