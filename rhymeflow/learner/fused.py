"""Norms, gated activations and rotary positions of Hugging Face models by one pass each, on CPUs.

`fuse` gives the modules of a model that compute what `elementwise` does a forward of their own;
parameters, names and files stay. Which modules those are is found by trying: a module is left as it
is unless its own forward gives the same numbers. A call costs some 30 microseconds more than
torch's own small ones, so it is for the learner's thousands of rows; an engine's few are run by
`engine/native/decoder.py`.

Holds true: results and gradients are those of the modules up to float rounding and do not depend on
the number of threads or on other rows; in other types than float32 and on other devices the
modules' own forward runs. Knows nothing of engine or learner.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rhymeflow.learner import elementwise
from rhymeflow.utils import threads

_BLOCK = 1024
"""Rows of one call of a kernel; sums over rows are taken block by block."""
_SMALL = 100_000
"""Elements of an array for which a second thread costs more than it brings."""


def fuse(model: nn.Module) -> None:
    """Have the modules of `model` compute by the kernels, where they compute the same."""
    for module in model.modules():
        if _is_rms_norm(module):
            module.forward = MethodType(_norm_forward, module)
        elif _is_swiglu(module):
            module.forward = MethodType(_mlp_forward, module)
        source = sys.modules[type(module).__module__]
        rotary = getattr(source, "apply_rotary_pos_emb", None)
        if rotary is not None and not isinstance(rotary, _Rotary) and _rotates(rotary):
            source.apply_rotary_pos_emb = _Rotary(rotary)  # type: ignore[attr-defined]


def _is_served(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu"


# -- RMSNorm ---------------------------------------------------------------------------------------


def _is_rms_norm(module: nn.Module) -> bool:
    """Whether `module(x)` is x over its root mean square, times a weight."""
    parameters = dict(module.named_parameters())
    if set(parameters) != {"weight"} or not hasattr(module, "variance_epsilon"):
        return False
    trial = copy.copy(module)
    weight = torch.linspace(-1.0, 2.0, parameters["weight"].shape[-1])
    trial._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    x = torch.linspace(-2.0, 3.0, 2 * len(weight)).reshape(1, 2, len(weight))
    return _agree(trial, lambda: _norm_forward(trial, x), lambda: type(trial).forward(trial, x))


def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    if not (_is_served(hidden_states) and _is_served(self.weight)):
        own: Tensor = type(self).forward(self, hidden_states)
        return own
    out: Tensor = _RMSNorm.apply(hidden_states, self.weight, float(self.variance_epsilon))
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        x, out = x.contiguous(), torch.empty(x.shape)
        # A copy: FSDP resizes a gathered parameter's memory, which numpy would hold on to.
        weight_D, dim = weight_D.detach().clone(), x.shape[-1]
        scale_T = torch.empty(x.numel() // dim)
        x_, weight_, out_, scale_ = _flat(x, weight_D, out, scale_T)

        def rows(first: int, last: int) -> None:
            elementwise.rms_norm(x_, weight_, np.float32(epsilon), first, last, out_, scale_)

        _in_blocks(rows, len(scale_T), dim)
        ctx.save_for_backward(x, weight_D, scale_T)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_D, scale_T = ctx.saved_tensors
        grad, grad_x = grad.contiguous(), torch.empty(x.shape)
        num_rows, dim = len(scale_T), x.shape[-1]
        sums_BD = torch.empty(-(-num_rows // _BLOCK), dim)
        x_, weight_, scale_, grad_, grad_x_ = _flat(x, weight_D, scale_T, grad, grad_x)
        sums_ = sums_BD.numpy()

        def rows(first: int, last: int) -> None:
            sums = sums_[first // _BLOCK]
            elementwise.rms_norm_gradient(x_, weight_, scale_, grad_, first, last, grad_x_, sums)

        _in_blocks(rows, num_rows, dim)
        return grad_x, sums_BD.sum(0), None


# -- SwiGLU ----------------------------------------------------------------------------------------

_PARTS = ("gate_proj", "up_proj", "down_proj")


def _is_swiglu(module: nn.Module) -> bool:
    """Whether `module(x)` is down_proj(silu(gate_proj(x)) * up_proj(x))."""
    if not all(isinstance(getattr(module, part, None), nn.Linear) for part in _PARTS):
        return False
    learnt = {name.split(".")[0] for name, _ in module.named_parameters()}
    if learnt != set(_PARTS):  # as BitNet's norm before the last product
        return False
    trial = copy.copy(module)
    trial._modules = dict(module._modules)
    for part, factor in zip(_PARTS, (1.0, -0.5, 3.0), strict=True):
        trial._modules[part] = _Times(factor)
    x = torch.linspace(-6.0, 5.0, 64).reshape(1, 4, 16)
    return _agree(trial, lambda: _mlp_forward(trial, x), lambda: type(trial).forward(trial, x))


class _Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def _mlp_forward(self: Any, x: Tensor) -> Tensor:
    if not _is_served(x):
        own: Tensor = type(self).forward(self, x)
        return own
    out: Tensor = self.down_proj(_SwiGLU.apply(self.gate_proj(x), self.up_proj(x)))
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up, out = gate.contiguous(), up.contiguous(), torch.empty(gate.shape)
        arrays, dim = _flat(gate, up, out), gate.shape[-1]

        def rows(first: int, last: int) -> None:
            gate_, up_, out_ = arrays
            elementwise.swiglu(gate_, up_, first * dim, last * dim, out_)

        _in_blocks(rows, gate.numel() // dim, dim)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty(gate.shape), torch.empty(gate.shape)
        arrays, dim = _flat(gate, up, grad.contiguous(), grad_gate, grad_up), gate.shape[-1]

        def rows(first: int, last: int) -> None:
            gate_, up_, grad_, *out = arrays
            elementwise.swiglu_gradient(gate_, up_, grad_, first * dim, last * dim, *out)

        _in_blocks(rows, gate.numel() // dim, dim)
        return grad_gate, grad_up


# -- Rotary positions ------------------------------------------------------------------------------


class _Rotary:
    """transformers' `apply_rotary_pos_emb` of one family, by the kernel where that serves."""

    def __init__(self, own: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.own = own

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Queries [1, H, T, D] and keys [1, G, T, D], turned by their positions' angles."""
        is_one_row = unsqueeze_dim == 1 and cos.shape == (1, q.shape[2], q.shape[3])
        if not (is_one_row and len(q) == 1 and all(map(_is_served, (q, k, cos, sin)))):
            return self.own(q, k, cos, sin, unsqueeze_dim)
        return _Rotate.apply(q, cos, sin), _Rotate.apply(k, cos, sin)


def _rotates(own: Callable[..., tuple[Tensor, Tensor]]) -> bool:
    """Whether `own` turns halves of vectors, as the kernel does."""
    angles_TD = torch.linspace(0.0, 3.0, 12).reshape(3, 4).repeat(1, 2)
    q, k = torch.linspace(-1.0, 1.0, 48).reshape(1, 2, 3, 8), torch.ones(1, 1, 3, 8)
    given = (q, k, angles_TD.cos()[None], angles_TD.sin()[None])
    return _agree(
        own, lambda: torch.cat(_Rotary(own)(*given), 1), lambda: torch.cat(own(*given), 1)
    )


class _Rotate(torch.autograd.Function):
    """Of what is turned, [1, H, T, D], memory is [T, H, D], as attention wants it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _turned(grad, *ctx.saved_tensors, -1.0), None, None


def _turned(x_1HTD: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    x_THD = x_1HTD[0].transpose(0, 1).contiguous()
    out_THD = torch.empty(x_THD.shape)
    num_rows, heads, dim = x_THD.shape
    x_, cos_, sin_, out_ = _flat(x_THD, cos.contiguous(), sin.contiguous(), out_THD)

    def rows(first: int, last: int) -> None:
        elementwise.rotate(x_, cos_, sin_, dim, first, last, np.float32(sign), out_)

    _in_blocks(rows, num_rows, heads * dim)
    return out_THD.transpose(0, 1)[None]


# -- What they share -------------------------------------------------------------------------------


def _agree(tried: Any, found: Callable[[], Tensor], expected: Callable[[], Tensor]) -> bool:
    """Whether both give the same numbers."""
    with torch.no_grad():
        return torch.allclose(found(), expected(), rtol=1e-4, atol=1e-5)


def _flat(*tensors: Tensor) -> list[np.ndarray]:
    return [tensor.detach().reshape(-1).numpy() for tensor in tensors]


def _in_blocks(rows: Callable[[int, int], None], count: int, dim: int) -> None:
    """Call `rows` for every block of `count` rows of `dim` elements."""
    blocks = [(first, min(first + _BLOCK, count)) for first in range(0, count, _BLOCK)]
    num_threads = torch.get_num_threads() if count * dim > _SMALL else 1
    threads.run(lambda block: rows(*block), blocks, min(num_threads, len(blocks)))


__all__ = ["fuse"]
