"""AdamW whose moments take a byte each: 2 bytes a parameter in place of 8.

A moment is stored as the nearest of 255 fractions of the greatest in its block, of 256 values of a
row (arXiv 2110.02861: dynamic, block-wise quantisation). Blocks do not cross rows, of which ranks
have whole ones. Of the second moment the root is stored, whose range is half as wide, and never
rounded to 0, since it divides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 256  # values that share a scale
MOMENTS = ("exp_avg", "exp_avg_root")


class AdamW8bit(torch.optim.Optimizer):
    """Steps tensors of two or more dimensions, as `torch.optim.AdamW` does but for the rounding."""

    def __init__(self, params: list[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Apply the gradients."""
        for group in self.param_groups:
            first, second = group["betas"]
            for each in group["params"]:
                state = self.state[each]
                state["step"] = state.get("step", 0) + 1
                average, root = self.moments(each).values()
                average.lerp_(each.grad, 1 - first)
                root.square_().mul_(second).addcmul_(each.grad, each.grad, value=1 - second).sqrt_()
                self.store(each, average, root)
                unbiased = (1 - second ** state["step"]) ** 0.5
                rate = group["lr"] / (1 - first ** state["step"])
                each.mul_(1 - group["lr"] * group["weight_decay"])
                each.addcdiv_(average, root.div_(unbiased).add_(group["eps"]), value=-rate)

    def moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the moments by name, in float32; they are not those that are stored."""
        found: dict[str, tuple[Tensor, Tensor]] = self.state.get(parameter, {})
        zero = torch.zeros_like
        return {
            name: unpacked(*found[name], parameter) if name in found else zero(parameter)
            for name in MOMENTS
        }

    def store(self, parameter: Tensor, average: Tensor, root: Tensor) -> None:
        """Store the moments, rounded. Those that `moments` returned come back the same."""
        packs = packed(average), packed(root, divides=True)
        self.state[parameter].update(zip(MOMENTS, packs, strict=True))


def packed(values: Tensor, *, divides: bool = False) -> tuple[Tensor, Tensor]:
    """Round values: their codes, uint8 [rows, blocks, 256], and the greatest of each block. If they
    divide, what is above 0 stays above 0."""
    width = values.shape[-1]
    padded = torch.nn.functional.pad(values.reshape(-1, width), (0, -width % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK))
    greatest = blocks.abs().amax(2, keepdim=True)
    codes = codebook(values.device)
    between = (codes[1:] + codes[:-1]) / 2
    fractions = blocks / greatest.clamp_min(torch.finfo(values.dtype).tiny)
    found = torch.bucketize(fractions, between, out_int32=True)
    if divides:
        found += (blocks > 0) & (found == len(codes) // 2)
    return found.to(torch.uint8), greatest


def unpacked(codes: Tensor, greatest: Tensor, like: Tensor) -> Tensor:
    """Return rounded values, float32, in the shape of `like`."""
    values = codebook(like.device)[codes.int()].mul_(greatest).flatten(1)
    return values[:, : like.shape[-1]].reshape(like.shape)


def codebook(device: torch.device) -> Tensor:
    """Return the fractions, in order: 0, and of either sign 1 and the middles of 2^i equal parts of
    a tenth to 1 times 10^(i - 6), for i from 0 to 6."""
    parts = [torch.linspace(0.1, 1.0, 2**i + 1) * 10.0 ** (i - 6) for i in range(7)]
    middles = torch.cat([(each[1:] + each[:-1]) / 2 for each in parts])
    middles[-1] = 1.0  # so that the greatest of a block stays as it is
    return torch.cat([-middles.flip(0), torch.zeros(1), middles]).to(device)
