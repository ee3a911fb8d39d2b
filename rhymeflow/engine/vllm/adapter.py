"""An adapter in vLLM: in vLLM's own LoRA layers, from memory.

There is one place for one adapter, which every request names: beside requests with an adapter,
vLLM's CPU kernels give it also to those without. A pull writes the new matrices over the old ones.
What is under the adapter, which no version changes, is read from the model's files, proved, and
hashed again part by part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from rhymeflow.config import Config
from rhymeflow.core.types import Version
from rhymeflow.engine.vllm.installed import ADAPTER_RANKS
from rhymeflow.engine.vllm.weights import InstalledWeights
from rhymeflow.models import proof
from rhymeflow.models.adapter_files import Adapter
from rhymeflow.models.buffers import published_buffers
from rhymeflow.models.frozen_base import NAME, PARTS, FrozenBase, require_base, require_unchanged
from rhymeflow.models.lora import (
    adapter_in,
    draw_adapter,
    load_policy,
    resolved_adapter,
    unversioned,
    versioned,
)
from rhymeflow.models.rope import fix_longrope
from rhymeflow.weights.base import PulledParts, RowsSource, Update, WeightReader
from rhymeflow.weights.install import Installation, or_newer
from rhymeflow.weights.manifest import Manifest, ManifestMismatch, manifest_of
from rhymeflow.weights.proof import ChecksumMismatch, ProvedWeights, bytes_of
from rhymeflow.weights.publish import checksum_of, row_digests

_ID = 1


def adapter_args(config: Config) -> dict[str, Any]:
    """Return what of the arguments of vLLM's `EngineArgs` the model's adapter needs, if any."""
    if (adapter := resolved_adapter(config.model)) is None:
        return {}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in ADAPTER_RANKS if rank >= adapter.rank),
        "lora_target_modules": sorted({n.rpartition(".")[2] for n in adapter.target_modules}),
    }


def lora_request() -> Any:
    """Return what a request names the adapter by."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", _ID, "in memory")  # vLLM reads no files of one that it has


class BaseParts(NamedTuple):
    """What one process has of the model under the adapter; proved with what the others have."""

    manifest: Manifest
    pulled: PulledParts


class _Seal:
    """Digests of what no version changes, by which a change in place is found."""

    def __init__(self, digests: Mapping[str, Callable[[], int]]) -> None:
        self._parts = [(name, take, take()) for name, take in digests.items()]
        self._num_checked = 0

    def check_part(self) -> None:
        """Hash the next of `PARTS` parts again. Raises `ChecksumMismatch` if it has changed."""
        part = self._parts[self._num_checked % PARTS :: PARTS]
        self._num_checked += 1
        require_unchanged({name: due for name, _, due in part}, [take() for _, take, _ in part])


class InstalledAdapter:
    """The adapter in one process's part of vLLM's model; undefined after an error."""

    def __init__(self, runner: Any, config: Config, device: torch.device) -> None:
        """Fill vLLM's model with what is under the adapter. Raises `ManifestMismatch` if a tensor
        has no place there."""
        self._vllm_model, self._dtype = runner.model, runner.model_config.dtype
        cpu = torch.device("cpu")
        model = load_policy(config.model, dtype=self._dtype, device=cpu)
        self._model: PreTrainedModel | None = fix_longrope(model, config)  # until it is proved
        self._base_checksum = FrozenBase(model).checksum
        tensors = unversioned(model) | published_buffers(model, self._dtype)
        reader = _Loaded({name: each.detach() for name, each in tensors.items()})
        installed = InstalledWeights(runner.model, reader)
        self.base = BaseParts(reader.manifest, installed.install(reader, compare=True))
        self._base_seal = _Seal(installed.digests())
        self.holds: ProvedWeights | None = None
        """The version that was installed last."""
        own = versioned(model).items()
        self._own = {name: torch.empty_like(each, device=device) for name, each in own}
        self._learners_base = torch.zeros_like(self._base_checksum, device=device)
        self._weights = Installation(self._own | {NAME: self._learners_base})
        adapter = adapter_in(model)
        assert isinstance(adapter, Adapter)
        self._scale = adapter.scale
        runner.lora_manager.add_dummy_lora(lora_request(), adapter.rank)  # as vLLM's warm-up does
        self._manager = runner.lora_manager._adapter_manager
        self._manager.activate_adapter(_ID)
        self._slot: int = self._manager.lora_index_to_id.index(_ID)
        self._layers = self._find_layers()

    @torch.no_grad()
    def install(
        self, reader: WeightReader, want: Version | None = None, *, compare: bool = False
    ) -> PulledParts:
        """Do what `InstalledWeights.install` does; layers are compared after each pull, and before
        the next: `compare` has no effect.

        Raises:
            ChecksumMismatch: a layer has another adapter, the learner has another model under it,
                or this engine's has changed.
        """
        if self.holds is not None:
            self._compare("have changed in place since they were proved")
            self._base_seal.check_part()
        self.holds = None
        pulled = or_newer(partial(self._weights.pull_part, reader), want)
        require_base(self._learners_base.cpu(), self._base_checksum)
        self._put(self._own)
        self._compare("are not those that were pulled")
        self.holds = pulled.weights
        return pulled

    def draw(self) -> None:
        """Give the layers made-up values, which `prove` removes: a new adapter changes nothing, and
        would prove nothing."""
        assert self._model is not None
        draw_adapter(self._model)
        self._put({name: each.detach() for name, each in versioned(self._model).items()})

    def prove(self, ids: list[int], num_prompt: int, logprobs: list[float]) -> None:
        """Raise `UserError` unless vLLM's log-probabilities of a response are the model's own, with
        the adapter of `draw` (law 7)."""
        assert self._model is not None
        expected = proof.own_logprobs(self._model, [(ids, num_prompt)])
        proof.check(self._model, torch.tensor(logprobs), expected, "vLLM")
        self._model = None
        self._put(self._own)

    def _find_layers(self) -> dict[str, list[str]]:
        """Return, for each of vLLM's layers that is adapted, the layers of transformers' model
        that it is fused from, "" for one that is not adapted."""
        packed: Mapping[str, list[str]] = self._manager.packed_modules
        parts = {name: packed.get(name, [name]) for name in self._manager.modules}
        known = {part for each in parts.values() for part in each}
        mapper = getattr(self._vllm_model, "hf_to_vllm_mapper", None)
        found: dict[str, str] = {}
        for layer in dict.fromkeys(tensor.rpartition(".")[0] for tensor in self._own):
            theirs = layer
            if theirs not in known and mapper is not None:
                theirs = (mapper.map_name(f"{layer}.weight") or "").removesuffix(".weight")
            if theirs not in known:
                raise ManifestMismatch(
                    f"{layer}: vLLM's {type(self._vllm_model).__name__} has no such layer that "
                    "takes an adapter"
                )
            found[theirs] = layer
        layers = {name: [found.get(part, "") for part in each] for name, each in parts.items()}
        return {name: each for name, each in layers.items() if any(each)}

    def _matrices(
        self, tensors: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Any, list[Tensor | None], list[Tensor | None]]]:
        """Yield each of vLLM's layers that is adapted, its name, and its parts' A and scaled B."""
        for name, layers in self._layers.items():
            all_a = [tensors.get(f"{layer}.lora_A") for layer in layers]
            all_b = [
                None if b is None else (b.float() * self._scale).to(self._dtype)
                for b in (tensors.get(f"{layer}.lora_B") for layer in layers)
            ]
            yield name, self._manager.modules[name], all_a, all_b

    def _put(self, tensors: Mapping[str, Tensor]) -> None:
        for _, layer, all_a, all_b in self._matrices(tensors):
            layer.set_lora(self._slot, _as_given(all_a), _as_given(all_b))

    def _compare(self, problem: str) -> None:
        """Raise `ChecksumMismatch` unless the layers have, to the bit, this process's rows and
        columns of the proved matrices."""
        for name, layer, all_a, all_b in self._matrices(self._own):
            if layer.tp_size > 1:
                all_a = _as_list(layer.slice_lora_a(_as_given(all_a)))
                all_b = _as_list(layer.slice_lora_b(_as_given(all_b)))
            places = *layer.lora_a_stacked, *layer.lora_b_stacked
            for place, due in zip(places, [*all_a, *all_b], strict=True):
                held = place[self._slot, 0]
                if due is None:
                    due = held.new_zeros(held.shape)
                rows, columns = held.shape[0] - due.shape[0], held.shape[1] - due.shape[1]
                if not torch.equal(held, F.pad(due, (0, columns, 0, rows))):
                    raise ChecksumMismatch(
                        f"the matrices of the adapter in {name} of vLLM's model {problem}"
                    )


def _as_given(parts: list[Tensor | None]) -> Any:
    """Return the parts as vLLM wants them: without a list if the layer has only one."""
    return parts if len(parts) > 1 else parts[0]


def _as_list(given: Any) -> list[Tensor | None]:
    return given if isinstance(given, list) else [given]


class _Loaded(WeightReader):
    """Reads tensors of this process, as version 0."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.manifest, self._tensors = manifest_of(tensors), tensors

    def update(self, have: ProvedWeights | None, want: Version | None) -> Update:
        """Return all of them."""
        digests = row_digests(self.manifest, self._tensors)
        weights = ProvedWeights(0, checksum_of(self.manifest, digests))
        source = RowsSource(self.manifest, lambda spec: bytes_of(self._tensors[spec.name]), None)
        return Update(self.manifest, weights, lambda: digests, [source])
