"""A weight laid out once for the CPU's matrix instructions.

oneDNN multiplies by a weight that it has laid out ("packed") a fifth to a third faster than by one
it must rearrange on each call; in float32 on an AMD processor, where torch would ask MKL, up to
four times.

Holds true: results equal the unpacked product's up to float rounding; where this build of torch has
no oneDNN, and in types that oneDNN does not multiply on this processor (float64 on any, bfloat16
without AVX-512), nothing is packed. Later changes of the weight are not seen.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 32
"""Rows per call that the layout is made for; others work."""


class Packed:
    """A linear map with its own, packed copy of the weight."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._plain = not _can_pack(weight_OI.dtype)
        self._bias_O = bias_O
        self._weight = (
            weight_OI if self._plain else torch.ops.mkldnn._reorder_linear_weight(weight_OI, ROWS)
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Return x @ weight^T + bias."""
        if self._plain:
            return F.linear(x, self._weight, self._bias_O)
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias_O, "none", [], "")


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


__all__ = ["Packed"]
