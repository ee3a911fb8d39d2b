"""The native engine behind the seam: a Hugging Face model in this process, on one device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

import torch

from rhymeflow.config import Config
from rhymeflow.core.types import Version
from rhymeflow.cpu import choice
from rhymeflow.engine.base import Finished, Limits, Load, Request
from rhymeflow.engine.native.cpu_attention import CpuAttention
from rhymeflow.engine.native.engine import Engine
from rhymeflow.histospec.draft import DraftStats
from rhymeflow.histospec.drafter import Drafter
from rhymeflow.histospec.handle import IndexHandle
from rhymeflow.models.attention import Shape
from rhymeflow.models.load import (
    empty_model,
    load_config,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
    stop_token_ids,
)
from rhymeflow.models.rope import settled
from rhymeflow.weights.base import WeightReader
from rhymeflow.weights.install import Installation
from rhymeflow.weights.proof import Pulled


def load_kernels(config: Config) -> None:
    """Load the code that an engine will run, or compile it: on a machine's first run, seconds."""
    device = resolve_device(config.model)
    dtype = resolve_dtype(config.model, device)
    head_dim = Shape.of(load_config(config.model)).head_dim
    if choice.has_attention(device, dtype, head_dim):
        rehearse(dtype, head_dim)


def rehearse(dtype: torch.dtype, head_dim: int) -> None:
    """Load or compile what an engine on a CPU runs, whatever the model."""
    CpuAttention(dtype, head_dim)


class NativeEngine:
    """A `base.Engine`. It begins with the newest weights of `weights`.

    `instance` goes into the segments of what is generated. `drafter_for` makes a drafter of an
    index and of the most tokens that a prompt and its response can have.
    """

    def __init__(
        self,
        config: Config,
        weights: WeightReader,
        *,
        instance: str,
        drafter_for: Callable[[IndexHandle, int], Drafter],
    ) -> None:
        rollout, device = config.rollout, resolve_device(config.model)
        dtype = resolve_dtype(config.model, device)
        self.model = settled(empty_model(config.model, dtype=dtype, device=device), config)
        self._weights = Installation(dict(self.model.named_parameters()))
        self._drafter_for = drafter_for
        self._drafter: Drafter | None = None
        stop_tokens = stop_token_ids(self.model, load_tokenizer(config.model))
        pulled = self._weights.pull(weights)
        self._checksum = pulled.checksum
        text = self.model.config.get_text_config()
        capacity = rollout.max_kv_tokens or rollout.max_num_seqs * text.max_position_embeddings
        self._engine = Engine(
            self.model,
            seed=config.run.seed,
            max_num_seqs=rollout.max_num_seqs,
            max_prefill_tokens=rollout.max_prefill_tokens,
            instance=instance,
            version=pulled.version,
            kv_capacity=capacity,
        )
        self._engine.prove()
        max_length = self._engine.max_length
        self._limits = Limits(rollout.max_num_seqs, max_length, capacity, stop_tokens)

    @property
    def version(self) -> Version:
        """The weights that it computes with."""
        return self._engine.version

    @property
    def checksum(self) -> int:
        """Of the weights that it computes with, as they were proved."""
        return self._checksum

    @property
    def has_work(self) -> bool:
        """Whether anything runs or waits."""
        return self._engine.has_work

    def limits(self) -> Limits:
        """What it can hold."""
        return self._limits

    def load(self) -> Load:
        """How it is now."""
        engine = self._engine
        return Load(
            engine.num_running,
            tuple(engine.waiting_ids()),
            engine.kv_tokens,
            engine.clock,
            engine.tokens_generated,
            DraftStats() if self._drafter is None else self._drafter.stats,
            engine.prefill_seconds,
        )

    def submit(self, request: Request) -> None:
        """Queue a request; see `base.Engine`."""
        self._engine.submit(request)

    def poll(self, timeout: float) -> list[Finished]:
        """Run one iteration, if there is anything to run; it never waits."""
        return self._engine.step()

    def interrupt(self, ids: Iterable[Hashable] | None = None) -> list[Request]:
        """Stop requests; see `base.Engine`."""
        return self._engine.interrupt(ids)

    def prepare(self, weights: WeightReader, want: Version) -> bool:
        """Fetch what changed; see `base.Engine`."""
        return weights.prepare(Pulled(self.version, self.checksum), want)

    def install(self, weights: WeightReader, want: Version, *, keep_cache: bool) -> Pulled:
        """Copy weights into the model; see `base.Engine`."""
        pulled = self._weights.pull_at_least(weights, want)
        self._checksum = pulled.checksum
        self._engine.set_version(pulled.version, keep_cache=keep_cache)
        return pulled

    def draft_from(self, index: IndexHandle) -> None:
        """Draft from this index; see `base.Engine`."""
        self._drafter = self._drafter_for(index, self._limits.max_length)
        self._engine.draft_with(self._drafter)

    def close(self) -> None:
        """The model goes with the process."""
