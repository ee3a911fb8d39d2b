"""Linear layers with weights laid out for the CPU's matrix instructions.

oneDNN multiplies by a weight that it has laid out once ("packed") a fifth to a third faster than by
one it must rearrange on each call. `PackedLinears` puts such a copy behind every linear layer of a
model, for inference only; parameters keep their names and storage, so weights are pulled into the
model as before, and `refresh` packs them again.

Holds true: results equal the unpacked layer's up to float rounding; on other devices, or where this
build of torch has no oneDNN, nothing is touched.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 32
"""Rows per call that the layout is made for; others work."""


class Packed:
    """A linear map with its own, packed copy of the weight."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._plain = not torch.backends.mkldnn.is_available()
        self._bias_O = bias_O
        self._weight = (
            weight_OI if self._plain else torch.ops.mkldnn._reorder_linear_weight(weight_OI, ROWS)
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Return x @ weight^T + bias."""
        if self._plain:
            return F.linear(x, self._weight, self._bias_O)
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias_O, "none", [], "")


class PackedLinears:
    """The linear layers of a model's body, packed; in force inside a `with` block.

    Outside it the model is as it was, so a learner may use the same model object.
    """

    def __init__(self, body: nn.Module) -> None:
        self._layers = [
            module
            for module in body.modules()
            if type(module) is nn.Linear and module.weight.device.type == "cpu"
        ]
        self._packed: list[Packed] = []
        self.refresh()

    def refresh(self) -> None:
        """The model's weights have changed."""
        self._packed = [Packed(layer.weight.detach(), layer.bias) for layer in self._layers]

    def __enter__(self) -> None:
        for layer, packed in zip(self._layers, self._packed, strict=True):
            # An instance's attribute goes before its class's method.
            layer.__dict__["forward"] = packed

    def __exit__(self, *_: object) -> None:
        for layer in self._layers:
            del layer.__dict__["forward"]


__all__ = ["Packed", "PackedLinears"]
