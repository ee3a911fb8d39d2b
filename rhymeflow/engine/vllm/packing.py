"""vLLM's packers: a layer is given its weights anew, and compared with a freshly made one.

Holds true: `compare_products` and `compare_packed` leave the layer as it was. Imports no vLLM:
layers pack themselves (`quant_method.process_weights_after_loading`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rhymeflow.weights.base import ChecksumMismatch

PROBE_ROWS = 3


def pack(layer: Any, weights: Mapping[str, Tensor]) -> None:
    """Give the layer its weights as if it had just been loaded, and let it pack them."""
    for attribute, weight in weights.items():
        setattr(layer, attribute, nn.Parameter(weight, requires_grad=False))
    if hasattr(layer.quant_method, "moe_kernel"):
        layer.quant_method.moe_kernel = None  # experts are packed when their kernel is made
    layer.quant_method.process_weights_after_loading(layer)


def compare_products(layer: Any, weight: Tensor) -> None:
    """Have a linear layer compute on a probe, and a fresh one of the same weight.

    Raises:
        ChecksumMismatch: they differ in any bit.
    """
    probe = _probe(weight)
    fresh: Any = nn.Module()
    fresh.quant_method = layer.quant_method
    pack(fresh, {"weight": weight.clone()})
    found = layer.quant_method.apply(layer, probe)
    due = layer.quant_method.apply(fresh, probe)
    if not torch.equal(found, due):
        raise ChecksumMismatch(
            f"a {type(layer).__name__} of vLLM's model does not compute what a fresh one "
            f"of the pulled weights does: off by {(found - due).abs().max().item():.3g}"
        )
    plain = probe.float() @ weight.float().T
    if not torch.allclose(due.float(), plain, rtol=0.05, atol=0.05 * plain.abs().max()):
        raise ChecksumMismatch(f"a fresh {type(layer).__name__} is no product at all")


def compare_packed(layer: Any, weights: Mapping[str, Tensor]) -> None:
    """Have a fresh layer pack the same weights: experts compute on what was routed to them only.

    Raises:
        ChecksumMismatch: what was packed differs in any bit.
    """
    fresh = copy.copy(layer)
    fresh._parameters = dict(layer._parameters)
    fresh.quant_method = copy.copy(layer.quant_method)
    pack(fresh, {attribute: weight.clone() for attribute, weight in weights.items()})
    for attribute in weights:
        if not torch.equal(getattr(layer, attribute), getattr(fresh, attribute)):
            raise ChecksumMismatch(
                f"{attribute} of a {type(layer).__name__} of vLLM's model is not what a fresh one "
                "makes of the pulled weights"
            )


def _probe(weight: Tensor) -> Tensor:
    """Rows to compute with: the same in every call."""
    size = weight.shape[1]
    values = torch.linspace(-1.0, 1.0, PROBE_ROWS * size, device=weight.device)
    return values.cos().reshape(PROBE_ROWS, size).to(weight.dtype)


__all__ = ["compare_packed", "compare_products", "pack"]
