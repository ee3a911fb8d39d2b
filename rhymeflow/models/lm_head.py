"""The output head of engine and learner: float32 logits, whatever the model's dtype.

A bfloat16 logit of 20 is rounded to a multiple of 1/8, an error of several percent in every
probability; if only one side rounded, the learner would see off-policy data. On CUDA the product
accumulates in float32. On CPUs a float32 copy of the weight is kept, packed for few rows unless
`many_rows`: from about a hundred rows the packed one is slower (61 against 85 GFLOPS on AVX2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from rhymeflow.cpu.products import Packed
from rhymeflow.models.copies import Copy, Own

_ROWS = 1 << 12  # that are converted to float32 at a time to be compared


class LMHead:
    """Computes float32 logits, without gradients."""

    def __init__(self, model: PreTrainedModel, *, many_rows: bool = False) -> None:
        self._linear = model.get_output_embeddings()
        self._factor, self._cap = _scaling(model.config.get_text_config())
        self._many_rows = many_rows
        self._float_product: Callable[[Tensor], Tensor] | None = None
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the copy of the weight after the model's weights changed."""
        weight = self._linear.weight
        if weight.device.type == "cpu" and weight.dtype != torch.float64:
            weight_VD, bias_V = weight.detach().float(), self._linear.bias
            bias_V = None if bias_V is None else bias_V.detach().float()
            unpacked = partial(F.linear, weight=weight_VD, bias=bias_V)
            self._float_product = unpacked if self._many_rows else Packed(weight_VD, bias_V)

    def copies(self) -> list[Copy]:
        """Return the copies that are packed, if there are any."""
        if not isinstance(self._float_product, Packed):
            return []
        held_VD, bias_V = self._float_product.held_OI, self._float_product.bias_O
        copies = [Copy(held_VD, partial(self._rows, "weight"))]
        return copies if bias_V is None else [*copies, Copy(bias_V, partial(self._rows, "bias"))]

    def _rows(self, name: str) -> Iterator[Own]:
        for rows in getattr(self._linear, name).split(_ROWS):
            yield self._linear, name, rows.float()

    @torch.no_grad()
    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return float32 logits [R, V] of hidden states [R, D], scaled and capped as in it."""
        logits_RV = self.product(hidden_RD)
        if self._factor != 1.0:
            logits_RV *= self._factor
        if self._cap is not None:
            logits_RV = logits_RV.div_(self._cap).tanh_().mul_(self._cap)
        return logits_RV

    def slope(self, logits_RV: Tensor) -> float | Tensor:
        """Return the derivative of these logits with respect to the head's products."""
        if self._cap is None:
            return self._factor
        return (1.0 - (logits_RV / self._cap) ** 2) * self._factor

    @torch.no_grad()
    def product(self, hidden_RD: Tensor) -> Tensor:
        """Return the head's products, before scaling and capping."""
        if self._float_product is not None:
            return self._float_product(hidden_RD.float())
        weight_VD, bias_V = self._linear.weight, self._linear.bias
        if hidden_RD.dtype in (torch.float32, torch.float64):
            return F.linear(hidden_RD, weight_VD, bias_V).float()
        logits_RV = torch.mm(hidden_RD, weight_VD.T, out_dtype=torch.float32)
        return logits_RV if bias_V is None else logits_RV + bias_V


def _scaling(config: PreTrainedConfig) -> tuple[float, float | None]:
    """Return the factor of the head's products, and the soft cap of the result. The options' names
    are transformers'; `proof.py` finds models that use others."""
    factor = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere
    scaling = float(getattr(config, "logits_scaling", None) or 1.0)
    factor *= float(getattr(config, "lm_head_multiplier", None) or 1.0)  # Falcon-H1
    factor *= scaling if config.model_type == "hyperclovax" else 1.0 / scaling  # Granite, MiniCPM3
    return factor, getattr(config, "final_logit_softcapping", None)  # Gemma, NanoChat
