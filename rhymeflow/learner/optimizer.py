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
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rhymeflow.config import LearnerConfig
from rhymeflow.errors import UserError


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


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Stop the parameters that a pattern matches from being trained, by any of their names.

    Raises:
        UserError: a pattern matches none, or no parameter is left.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        found = [parameter for name, parameter in named if fnmatchcase(name, pattern)]
        if not found:
            raise UserError(
                f"learner.frozen_parameters: {pattern!r} matches no parameter of the model, whose "
                f"names are as {named[0][0]!r} and {named[-1][0]!r}"
            )
        for parameter in found:
            parameter.requires_grad_(False)
    if patterns and not any(parameter.requires_grad for _, parameter in named):
        raise UserError("learner.frozen_parameters: every parameter is frozen, none is trained")


class AnyOptimizer:
    """AdamW over float32 `masters`, which may be the rows of a rank.

    Weight decay applies to matrices only, not to norms and biases.
    """

    def __init__(self, masters: Mapping[str, Tensor], config: LearnerConfig) -> None:
        self._masters, self._max_grad_norm = masters, config.max_grad_norm
        self._adamw = adamw(masters, config)
        self.skipped = ""
        """Why the last step was not taken; empty: it was."""

    @torch.no_grad()
    def step(self, rate: float, scale: float = 1.0) -> float:
        """Apply the gradients times `scale` at learning rate `rate`, clear them, return their norm
        unclipped.

        If it is not finite they are not applied, and `skipped` says so.
        """
        for master in self._masters.values():
            if master.grad is None:  # nothing in the batch moves the policy; its momentum does
                master.grad = torch.zeros_like(master)
        norm = scale * self._norm()
        self.skipped = "" if math.isfinite(norm) else self._not_finite(norm)
        if not self.skipped:
            excess = 1.0 if self._max_grad_norm is None else (norm + 1e-6) / self._max_grad_norm
            for group in self._adamw.param_groups:
                group["lr"] = rate
            self._apply(max(excess, 1.0) / scale)
        self.clear()
        return norm

    def clear(self) -> None:
        """Forget the gradients."""
        self._adamw.zero_grad()

    def reconfigure(self, config: LearnerConfig) -> None:
        """Step by another configuration from now on; the moments stay."""
        self._max_grad_norm = config.max_grad_norm
        for group in self._adamw.param_groups:
            group["betas"] = (config.adam_beta1, config.adam_beta2)
            group["eps"] = config.adam_epsilon
            is_matrices = bool(group["params"]) and group["params"][0].ndim >= 2
            group["weight_decay"] = config.weight_decay if is_matrices else 0.0

    def _not_finite(self, norm: float) -> str:
        broken = self._broken()
        return (
            f"the gradient is not finite (norm {norm}) in {len(broken)} of {len(self._masters)} "
            f"parameters, first in {broken[0] if broken else 'none: the norm overflowed'}; a lower "
            "learner.learning_rate or learner.max_grad_norm, or model.dtype: float32, may help"
        )

    def _norm(self) -> float:
        """Of all gradients."""
        raise NotImplementedError

    def _broken(self) -> list[str]:
        """Names of parameters whose gradient is not finite."""
        raise NotImplementedError

    def _apply(self, divisor: float) -> None:
        """Step by the gradients over `divisor`."""
        raise NotImplementedError


class Optimizer(AnyOptimizer):
    """Owns the masters, their gradients and AdamW's moments for the parameters of `model`, which
    are brought to `compute_dtype` in place. Those that are frozen stay as they are otherwise."""

    def __init__(self, model: nn.Module, config: LearnerConfig, compute_dtype: torch.dtype):
        freeze(model, config.frozen_parameters)
        self._parameters = {n: each for n, each in model.named_parameters() if each.requires_grad}
        masters = {name: _master(each, compute_dtype) for name, each in self._parameters.items()}
        for parameter in model.parameters():
            parameter.data = parameter.data.to(compute_dtype)
        super().__init__(masters, config)

    def _norm(self) -> float:
        return float(nn.utils.get_total_norm([master.grad for master in self._masters.values()]))

    def _broken(self) -> list[str]:
        return [name for name, each in self._masters.items() if not each.grad.isfinite().all()]

    def _apply(self, divisor: float) -> None:
        # AdamW divides by it as it reads the gradients.
        some = next(iter(self._masters.values()))
        self._adamw.grad_scale = None if divisor == 1.0 else some.new_tensor(divisor)
        self._adamw.step()
        self._refresh()

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


def _master(parameter: nn.Parameter, compute_dtype: torch.dtype) -> Tensor:
    """The float32 master of `parameter`, whose gradient its gradients add to."""
    if compute_dtype == torch.float32:
        parameter.data = parameter.data.float()
        return parameter
    master = parameter.detach().float().clone()
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


__all__ = ["AnyOptimizer", "Optimizer", "adamw", "decayed_first", "freeze", "learning_rate"]
