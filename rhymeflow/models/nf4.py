"""Frozen linear layers of 4 bits a weight (NF4; QLoRA, arXiv 2305.14314), by bitsandbytes.

A layer computes with weights that `dequantize_4bit` makes of them, in learner and engine alike.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rhymeflow.utils.extras import extra

_BLOCK = 64
"""Weights that have a scale, float32, together."""
_AT_A_TIME = 1 << 18
"""Weights that are quantized at a time: on CPUs each takes 20 bytes of working memory."""
BYTES = 0.5 + 4 / _BLOCK
"""Bytes of a weight."""


def library() -> Any:
    """Return bitsandbytes' functions. Raises `UserError` if it is not installed."""
    extra("bitsandbytes", "model.quantization = 'nf4'", "qlora")
    return extra("bitsandbytes.functional", "model.quantization = 'nf4'", "qlora")


class NF4Linear(nn.Linear):
    """A linear layer that is not trained. `weight` is made of the 4 bits whenever it is read, so a
    backward pass keeps none; an engine that has the memory may `hold` it."""

    codes: Tensor
    scales: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        weight = layer.weight.detach()
        numbers = weight.reshape(-1)
        codes = numbers.new_empty((-(-len(numbers) // 2), 1), dtype=torch.uint8)
        scales = numbers.new_empty(-(-len(numbers) // _BLOCK), dtype=torch.float32)
        for start in range(0, len(numbers), _AT_A_TIME):
            part = numbers[start : start + _AT_A_TIME]
            made, state = library().quantize_4bit(part, blocksize=_BLOCK, quant_type="nf4")
            codes[start // 2 :][: len(made)] = made
            scales[start // _BLOCK :][: len(state.absmax)] = state.absmax
        state.shape, state.absmax = weight.shape, scales
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._state, self.bias = state, layer.bias
        self._held: Tensor | None = None
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight, [O, I], in the precision of the layer that it was made of."""
        return self.made() if self._held is None else self._held

    def made(self) -> Tensor:
        """Return the weight, made anew."""
        made: Tensor = library().dequantize_4bit(self.codes, self._state)
        return made

    def hold(self) -> None:
        """Keep the weight."""
        self._held = self.weight

    def forward(self, input: Tensor) -> Tensor:
        """Return the product."""
        if torch.is_grad_enabled() and input.requires_grad:
            made: Tensor = _Product.apply(input, self)  # type: ignore[no-untyped-call]
            return made
        return F.linear(input, self.weight, self.bias)

    def share(self, other: NF4Linear) -> None:
        """Take the other's weights."""
        self._state, self._held, self.bias = other._state, other._held, other.bias
        self.register_buffer("codes", other.codes)
        self.register_buffer("scales", other.scales)


class _Product(torch.autograd.Function):
    """Makes the weight anew for the backward pass, rather than keep it."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, layer: NF4Linear) -> Tensor:
        ctx.layer = layer
        return F.linear(input, layer.weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.weight, None
