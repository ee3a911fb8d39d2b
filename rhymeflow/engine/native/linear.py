"""Linear layers with weights laid out for the CPU's matrix instructions.

`PackedLinears` puts a packed copy (`models/packed.py`) behind every linear layer of a model, for
inference only; parameters keep their names and storage, so weights are pulled into the model as
before, and `refresh` packs them again.

Holds true: results equal the unpacked layer's up to float rounding; on other devices nothing is
packed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rhymeflow.models.packed import Packed

JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of sibling layers that get the same input in transformers' models. It is only a guess at
what is worth joining: a layer that is called with another input computes its own."""


class _Joined:
    """Several linear maps of one input as one product; the first to be called computes them all."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        biases: list[Tensor] = [layer.bias for layer in layers]
        self._sizes = [layer.out_features for layer in layers]
        self._packed = Packed(
            torch.cat([layer.weight.detach() for layer in layers]),
            None if biases[0] is None else torch.cat(biases),
        )
        self._input: Tensor | None = None
        self._outputs: list[Tensor] = []

    def part(self, place: int) -> Callable[[Tensor], Tensor]:
        """The forward of the layer at `place`."""

        def forward(x: Tensor) -> Tensor:
            if x is not self._input:
                self._input, self._outputs = x, list(self._packed(x).split(self._sizes, -1))
            output = self._outputs[place]
            if place == len(self._sizes) - 1:
                self.forget()  # or a prefill would keep every layer's activations
            return output

        return forward

    def forget(self) -> None:
        """Let go of the last input and what was computed from it."""
        self._input, self._outputs = None, []


class PackedLinears:
    """The linear layers of a model's body, packed; in force inside a `with` block.

    Layers that are known to share their input are one product (`JOINED`). Outside the block the
    model is as it was, so a learner may use the same model object.
    """

    def __init__(self, body: nn.Module) -> None:
        self._groups = [group for module in body.modules() for group in _groups_of(module)]
        self._forwards: list[tuple[nn.Linear, Callable[[Tensor], Tensor]]] = []
        self._joined: list[_Joined] = []
        self.refresh()

    def refresh(self) -> None:
        """The model's weights have changed."""
        self._forwards, self._joined = [], []
        for group in self._groups:
            if len(group) == 1:
                [layer] = group
                self._forwards.append((layer, Packed(layer.weight.detach(), layer.bias)))
                continue
            joined = _Joined(group)
            self._joined.append(joined)
            self._forwards += [(layer, joined.part(i)) for i, layer in enumerate(group)]

    def __enter__(self) -> None:
        for layer, forward in self._forwards:
            # An instance's attribute goes before its class's method.
            layer.__dict__["forward"] = forward

    def __exit__(self, *_: object) -> None:
        for layer, _forward in self._forwards:
            del layer.__dict__["forward"]
        for joined in self._joined:
            joined.forget()


def _groups_of(module: nn.Module) -> list[list[nn.Linear]]:
    """The linear children of a module, those that share an input together."""
    linear = {
        name: child
        for name, child in module.named_children()
        if type(child) is nn.Linear and child.weight.device.type == "cpu"
    }
    groups = []
    for names in JOINED:
        group = [linear[name] for name in names if name in linear]
        if len(group) == len(names) and len({layer.bias is None for layer in group}) == 1:
            groups.append(group)
            linear = {name: child for name, child in linear.items() if name not in names}
    return groups + [[layer] for layer in linear.values()]


__all__ = ["PackedLinears"]
