"""AdamW on float32 master weights, whatever precision the model computes in.

With a bfloat16 model every gradient is added to a float32 sum as soon as autograd has it, AdamW
changes the float32 masters, and the model's parameters are refreshed from them: an update of 1e-6
is lost in bfloat16's 8 bits otherwise. With a float32 model the parameters are the masters.

Holds true: after `step` the model's parameters are the rounded masters and gradients are gone; a
gradient that is not finite changes no weight and no moment. Knows nothing of losses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rhymeflow.config import LearnerConfig
from rhymeflow.errors import UserError
from rhymeflow.learner.frozen import freeze


def learning_rate(step: int, config: LearnerConfig) -> float:
    """Learning rate of training step `step`, from 0; the same numbers as transformers' schedules.

    Linear warm-up from 0 over `warmup_steps`, then constant, or linearly or by a half cosine to 0
    at `max_steps`.
    """
    if step < config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
    progress = min(progress, 1.0)
    shape = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }
    return config.learning_rate * shape[config.lr_scheduler_type]


def adamw(masters: Mapping[str, Tensor], config: LearnerConfig) -> torch.optim.AdamW:
    """AdamW over `masters`; weight decay applies to matrices only, not to norms and biases."""
    matrices = [master for master in masters.values() if master.ndim >= 2]
    others = [master for master in masters.values() if master.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )


def decayed_first(masters: Mapping[str, Tensor]) -> list[str]:
    """Names in the order in which `adamw` numbers its parameters."""
    return sorted(masters, key=lambda name: masters[name].ndim < 2)


def reconfigure(optimizer: torch.optim.AdamW, config: LearnerConfig) -> None:
    """Have `adamw` step by another configuration from now on; the moments stay."""
    for group in optimizer.param_groups:
        group["betas"] = (config.adam_beta1, config.adam_beta2)
        group["eps"] = config.adam_epsilon
        is_matrices = bool(group["params"]) and group["params"][0].ndim >= 2
        group["weight_decay"] = config.weight_decay if is_matrices else 0.0


class Optimizer:
    """Owns the masters, their gradients and AdamW's moments for the parameters of `model`.

    The model's parameters are brought to `compute_dtype` in place; those that the configuration
    freezes stay as they are otherwise. Weight decay applies to matrices only, not to norms and
    biases.
    """

    def __init__(self, model: nn.Module, config: LearnerConfig, compute_dtype: torch.dtype):
        freeze(model, config.frozen_parameters)
        named = dict(model.named_parameters())
        self._parameters = {name: each for name, each in named.items() if each.requires_grad}
        for name in named.keys() - self._parameters.keys():
            named[name].data = named[name].data.to(compute_dtype)
        self._masters = {
            name: _master(parameter, compute_dtype) for name, parameter in self._parameters.items()
        }
        self._max_grad_norm = config.max_grad_norm
        self._adamw = adamw(self._masters, config)
        self.skipped = ""
        """Why the last step was not taken; empty: it was."""

    def step(self, rate: float, scale: float = 1.0) -> float:
        """Apply the gradients times `scale` at learning rate `rate`, clear them, return their norm
        unclipped.

        If it is not finite they are not applied, and `skipped` says so.
        """
        self.skipped = ""
        masters = list(self._masters.values())
        for master in masters:
            if master.grad is None:  # nothing in the batch moves the policy; its momentum does
                master.grad = torch.zeros_like(master)
        norm = scale * float(nn.utils.get_total_norm([master.grad for master in masters]))
        if not math.isfinite(norm):
            broken = [n for n, m in self._masters.items() if not m.grad.isfinite().all()]
            self.skipped = not_finite(norm, broken, len(self._masters))
            self.clear()
            return norm
        # AdamW divides by it as it reads the gradients.
        excess = 1.0 if self._max_grad_norm is None else (norm + 1e-6) / self._max_grad_norm
        divisor = max(excess, 1.0) / scale
        self._adamw.grad_scale = None if divisor == 1.0 else masters[0].new_tensor(divisor)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self._adamw.zero_grad()
        self._refresh()
        return norm

    def clear(self) -> None:
        """Forget the gradients."""
        self._adamw.zero_grad()

    def reconfigure(self, config: LearnerConfig) -> None:
        """Step by another configuration from now on; the moments stay."""
        self._max_grad_norm = config.max_grad_norm
        reconfigure(self._adamw, config)

    def state_dict(self) -> dict[str, Any]:
        """Masters and moments, exact."""
        masters = {name: master.detach() for name, master in self._masters.items()}
        return {"masters": masters, "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; the model's parameters are refreshed.

        AdamW's moments may also come by the parameters' names, as ranks save them (`moments`).
        """
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(state["masters"][name])
        if "moments" in state:
            moments = enumerate(map(state["moments"].get, decayed_first(self._masters)))
            groups = self._adamw.state_dict()["param_groups"]
            self._adamw.load_state_dict({"state": dict(moments), "param_groups": groups})
        else:
            self._adamw.load_state_dict(state["adamw"])
        self._refresh()

    def _refresh(self) -> None:
        """Round the masters into the model's parameters."""
        pairs = [(p, self._masters[name]) for name, p in self._parameters.items()]
        rounded = [(p, master) for p, master in pairs if p is not master]
        if rounded:
            with torch.no_grad():
                torch._foreach_copy_([p for p, _ in rounded], [m for _, m in rounded])


def not_finite(norm: float, broken: Sequence[str], num_parameters: int) -> str:
    """Says that a gradient is not finite in the parameters `broken`."""
    return (
        f"the gradient is not finite (norm {norm}) in {len(broken)} of {num_parameters} "
        f"parameters, first in {broken[0] if broken else 'none: the norm overflowed'}"
    )


class Skips:
    """Training steps in a row, `count` so far, of which an optimizer step was skipped."""

    def __init__(self, limit: int, count: int = 0) -> None:
        self._limit, self._count = limit, count

    def after(self, skipped: str) -> None:
        """A training step is over; `skipped`: why an optimizer step of it was, if one was.

        Raises:
            UserError: too many in a row were.
        """
        self._count = self._count + 1 if skipped else 0
        if self._count > self._limit:
            raise UserError(
                f"{skipped}, {self._count} steps in a row (learner.max_skipped_steps = "
                f"{self._limit}); the weights are unchanged. A lower learner.learning_rate or "
                "learner.max_grad_norm, or model.dtype: float32, usually helps"
            )


def _master(parameter: nn.Parameter, compute_dtype: torch.dtype) -> Tensor:
    """The float32 master of `parameter`, whose gradient its gradients add to."""
    if compute_dtype == torch.float32:
        parameter.data = parameter.data.float()
        return parameter
    master = parameter.detach().float().clone()
    parameter.data = parameter.data.to(compute_dtype)
    parameter.register_post_accumulate_grad_hook(partial(_drain, master))
    return master


def _drain(master: Tensor, parameter: nn.Parameter) -> None:
    """Move a gradient that autograd has just finished into the master's float32 sum."""
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad.add_(parameter.grad)
    parameter.grad = None


__all__ = [
    "Optimizer",
    "Skips",
    "adamw",
    "decayed_first",
    "learning_rate",
    "not_finite",
    "reconfigure",
]
