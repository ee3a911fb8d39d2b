"""A model's body, from token ids to the last hidden states, as an engine runs it.

`body_for` chooses: decoders of the common kind (`Decoder.serves`) are run layer by layer by
compiled code where attention is, on CPUs; every other model by its own modules, with the linear
ones packed.

Holds true: both compute what the model's modules do, up to float rounding, under whatever
`models.attention.Attention` they are given. Knows nothing of requests, caches or sampling.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rhymeflow.engine.native.decoder import Decoder
from rhymeflow.engine.native.linear import PackedLinears
from rhymeflow.models import attention


class Body(Protocol):
    """Runs a model's body over one packed row of tokens."""

    def run(self, ids: list[int], positions: list[int], how: attention.Attention) -> Tensor:
        """The last hidden states [T, D] of tokens at such positions."""
        ...

    def refresh(self) -> None:
        """The model's weights have changed, in place."""
        ...


def body_for(model: PreTrainedModel) -> Body:
    """The quickest that serves the model."""
    return Decoder(model.base_model) if Decoder.serves(model) else Modules(model)


class Modules:
    """A `Body` by the model's own modules."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._body, self._device = model.base_model, model.device
        self._linears = PackedLinears(model.base_model)

    def run(self, ids: list[int], positions: list[int], how: attention.Attention) -> Tensor:
        """See `Body`."""
        ids_1T = torch.tensor([ids], device=self._device)
        positions_1T = torch.tensor([positions], device=self._device)
        with self._linears, attention.attending(how):
            return self._body(
                input_ids=ids_1T, position_ids=positions_1T, use_cache=False
            ).last_hidden_state[0]

    def refresh(self) -> None:
        """See `Body`."""
        self._linears.refresh()


__all__ = ["Body", "Modules", "body_for"]
