"""Methods added to vLLM's workers, the processes that hold the model.

vLLM mixes `WorkerExtension` into its worker and calls its methods by name (`collective_rpc`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rhymeflow.config import Config
from rhymeflow.core.types import Version
from rhymeflow.engine.vllm.adapter import BaseParts, InstalledAdapter
from rhymeflow.engine.vllm.sampler import CounterSampler
from rhymeflow.engine.vllm.speculator import NoSpeculation, put_drafts
from rhymeflow.engine.vllm.weights import InstalledWeights
from rhymeflow.utils.objects import OwnerLost
from rhymeflow.weights.base import PulledParts, WeightHandle, WeightReader

PATH = f"{__name__}.WorkerExtension"  # the name by which vLLM imports it


class WorkerExtension:
    """Methods of vLLM's worker; `model_runner` and `device` are vLLM's."""

    model_runner: Any
    device: Any
    _rhymeflow_weights: InstalledWeights | InstalledAdapter

    def rhymeflow_sample(self) -> str:
        """Put our sampler in place of both of vLLM's; return the name of the runner's module."""
        runner = self.model_runner
        sampler = CounterSampler(runner)
        runner.sampler = runner.rejection_sampler = sampler
        return type(runner).__module__

    def rhymeflow_speculate(self) -> None:
        """Put our speculator in place of vLLM's; V2 only."""
        self.model_runner.speculator = NoSpeculation(self.model_runner.req_states)

    def rhymeflow_draft(self, drafts: Mapping[str, list[int]]) -> None:
        """Have the next iteration verify these drafts; V2 only."""
        put_drafts(self.model_runner.req_states, drafts)

    def rhymeflow_samples(self) -> int:
        """Return how often our sampler was called; V1 only."""
        return self.model_runner.sampler.num_calls

    def rhymeflow_join(self, join: Callable[[], None]) -> None:
        """Join the engine's process in sharing objects, if the worker is in another."""
        join()

    def rhymeflow_adapt(self, config: Config) -> BaseParts:
        """Put what is under the adapter into the model, and make a place for the adapter."""
        self._rhymeflow_adapter = InstalledAdapter(self.model_runner, config, self.device)
        self._rhymeflow_weights = self._rhymeflow_adapter
        return self._rhymeflow_adapter.base

    def rhymeflow_draw_adapter(self) -> None:
        """See `InstalledAdapter.draw`."""
        self._rhymeflow_adapter.draw()

    def rhymeflow_prove_adapter(self, *response: Any) -> None:
        """See `InstalledAdapter.prove`."""
        self._rhymeflow_adapter.prove(*response)

    def rhymeflow_prepare(self, source: WeightHandle, want: Version) -> bool | OwnerLost:
        """Begin to fetch what `rhymeflow_install` will need; return whether it has arrived."""
        have = self._rhymeflow_weights.holds  # the engine has pulled before
        try:
            return self._rhymeflow_open(source).prepare(have, want)
        except OwnerLost as error:
            return error

    def rhymeflow_install(
        self, source: WeightReader | WeightHandle, want: Version | None, compare: bool
    ) -> PulledParts | OwnerLost:
        """Pull weights; see `InstalledWeights.install`. `source` is a handle if the worker is not
        in the engine's process."""
        try:
            reader = self._rhymeflow_open(source) if isinstance(source, WeightHandle) else source
            if not hasattr(self, "_rhymeflow_weights"):
                self._rhymeflow_weights = InstalledWeights(self.model_runner.model, reader)
            return self._rhymeflow_weights.install(reader, want, compare=compare)
        except OwnerLost as error:  # returned, because vLLM would raise another exception
            return error

    def _rhymeflow_open(self, handle: WeightHandle) -> WeightReader:
        reader: WeightReader | None = getattr(self, "_rhymeflow_reader", None)
        if reader is None or reader.handle != handle:
            reader = handle.open()
            self._rhymeflow_reader = reader
        return reader
