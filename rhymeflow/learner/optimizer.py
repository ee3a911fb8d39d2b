"""AdamW or Muon on float32 master weights, whatever precision the model computes in.

With a bfloat16 model each gradient is added to a float32 sum as soon as autograd has computed it,
the float32 masters are updated, and the parameters are rounded from them: bfloat16's 8 bits would
lose an update of 1e-6. With a float32 model the parameters are the masters; with several ranks,
each rank's rows of them are (`policy.Shards`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn

from rhymeflow.config import LearnerConfig
from rhymeflow.errors import UserError
from rhymeflow.learner.adamw_8bit import AdamW8bit
from rhymeflow.learner.ranks import ALONE, Ranks, layers_of

_OTHERS: Mapping[str, Callable[[list[Tensor], float], torch.optim.Optimizer]] = {
    "adamw_8bit": AdamW8bit,
    # With this factor it takes AdamW's learning rates (arXiv 2502.16982).
    "muon": partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw"),
}
"""What steps matrices, if it is not AdamW; Muon those of layers."""


def learning_rate(step: int, config: LearnerConfig, peak: float | None = None) -> float:
    """Return the learning rate of training step `step`, from 0, as transformers' schedules do: it
    warms up linearly from 0 over `warmup_steps` to `peak` (None: the policy's), then stays
    constant, or falls at `max_steps` linearly to 0, or by a half cosine to `min_lr_rate` of it."""
    peak = config.learning_rate if peak is None else peak
    if step < config.warmup_steps:
        return peak * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
    progress = min(progress, 1.0)
    least, half = config.min_lr_rate, 0.5 * (1.0 + math.cos(math.pi * progress))
    shape = {"constant": 1.0, "linear": 1.0 - progress, "cosine": least + (1.0 - least) * half}
    return peak * shape[config.lr_scheduler_type]


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters that have a name (tied ones have several) matching a pattern. Raises
    `UserError` if a pattern matches none that is trained, or then none is."""
    named = [p for p in model.named_parameters(remove_duplicate=False) if p[1].requires_grad]
    for pattern in patterns:
        matching = [parameter for name, parameter in named if fnmatchcase(name, pattern)]
        if not matching:
            raise UserError(
                f"learner.frozen_parameters: {pattern!r} matches no parameter that is trained; "
                f"their names are as {named[0][0]!r} and {named[-1][0]!r}"
            )
        for parameter in matching:
            parameter.requires_grad_(False)
    if patterns and not any(parameter.requires_grad for _, parameter in named):
        raise UserError("learner.frozen_parameters: every parameter is frozen, none is trained")


class Optimizer:
    """Steps the parameters of `model` that are not frozen by `learner.optimizer`.

    It casts all parameters to `compute_dtype` in place, except with several ranks, where FSDP casts
    them. All methods are then collectives, and either all ranks step or none.
    """

    def __init__(
        self,
        model: nn.Module,
        config: LearnerConfig,
        compute_dtype: torch.dtype,
        ranks: Ranks = ALONE,
    ) -> None:
        self._ranks = ranks
        self._parameters = {n: each for n, each in model.named_parameters() if each.requires_grad}
        if ranks.count > 1:
            self._masters = {name: ranks.local(each) for name, each in self._parameters.items()}
        else:
            trained = self._parameters.items()
            self._masters = {name: _master(each, compute_dtype) for name, each in trained}
            for parameter in model.parameters():
                parameter.data = parameter.data.to(compute_dtype)
        chosen = self._chosen(model, config.optimizer)
        rest = [master for name, master in self._masters.items() if name not in chosen]
        # Weight decay applies to matrices only, not to norms and biases.
        matrices = [master for master in rest if master.ndim >= 2]
        others = [master for master in rest if master.ndim < 2]
        groups = [{"params": matrices}, {"params": others}]
        self._adamw = torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)
        self._rules: dict[str, torch.optim.Optimizer] = dict.fromkeys(self._masters, self._adamw)
        self._other: torch.optim.Optimizer | None = None
        """What steps the chosen matrices in AdamW's place."""
        if chosen:
            make = _OTHERS[config.optimizer]
            self._other = make([self._masters[name] for name in chosen], config.learning_rate)
            self._rules |= dict.fromkeys(chosen, self._other)
        self.reconfigure(config)
        self._divisor = 1.0
        """What the gradients are divided by: clipping, and the step's scale."""
        self.num_steps = 0
        """Optimizer steps taken."""
        self.skipped = ""
        """Why the last step was not taken; empty if it was taken."""

    def reconfigure(self, config: LearnerConfig) -> None:
        """Use another configuration, of the same `optimizer`, from now on, and keep the moments."""
        self._max_grad_norm = config.max_grad_norm
        more = [] if self._other is None else self._other.param_groups
        decays = (config.weight_decay, 0.0, *(config.weight_decay for _ in more))
        for group, decay in zip((*self._adamw.param_groups, *more), decays, strict=True):
            group["weight_decay"] = decay
            if "momentum" in group:
                group["momentum"] = config.muon_momentum
            else:
                group["betas"] = (config.adam_beta1, config.adam_beta2)
                group["eps"] = config.adam_epsilon

    def step(self, rate: float, scale: float = 1.0) -> float:
        """Apply the gradients times `scale` at learning rate `rate`; return their unclipped norm.

        If the norm is not finite, nothing is applied and `skipped` says why. Clears the gradients.
        """
        norm = self.measure(scale)
        if not self.skipped:
            self.apply(rate)
        self.clear()
        return norm

    @torch.no_grad()
    def measure(self, scale: float) -> float:
        """Take up the gradients times `scale` for `apply`; return their unclipped norm. If it is
        not finite, `skipped` says why."""
        for name, master in self._masters.items():
            if self._ranks.count > 1:
                self._take_gradient(master, self._parameters[name])
            if master.grad is None:  # no sample has a gradient, but the moments still move it
                master.grad = torch.zeros_like(master)
        norm = scale * self._norm()
        self.skipped = "" if math.isfinite(norm) else self._not_finite(norm)
        # 1e-6 as in `torch.nn.utils.clip_grad_norm_`.
        excess = 1.0 if self._max_grad_norm is None else (norm + 1e-6) / self._max_grad_norm
        self._divisor = max(excess, 1.0) / scale
        return norm

    @torch.no_grad()
    def apply(self, rate: float) -> None:
        """Step by the gradients that `measure` took up."""
        master = next(iter(self._masters.values()))
        # Fused AdamW divides the gradients by this as it reads them.
        grad_scale = None if self._divisor == 1.0 else master.new_tensor(self._divisor)
        self._adamw.grad_scale = grad_scale  # type: ignore[attr-defined]
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        if self._other is not None:
            (group,) = self._other.param_groups
            group["lr"] = rate
            torch._foreach_div_([each.grad for each in group["params"]], self._divisor)
            self._other.step()
        self.num_steps += 1
        self._refresh()

    def clear(self) -> None:
        """Discard the gradients."""
        for each in (*self._masters.values(), *self._parameters.values()):
            each.grad = None

    def state(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Yield what a checkpoint saves: a name (`master.NAME` and the like), the parameter, and
        this rank's rows, float32."""
        for name, master in self._masters.items():
            for kind, rows in (("master", master), *self._moments(name).items()):
                yield f"{kind}.{name}", self._parameters[name], rows.detach()

    @torch.no_grad()
    def load(self, num_steps: int, saved: Mapping[str, Tensor]) -> None:
        """Load what `state` yielded, by its names, and the number of steps."""
        self.num_steps = num_steps
        for name, master in self._masters.items():
            master.copy_(saved[f"master.{name}"])
            moments = self._moments(name)
            for kind, rows in moments.items():
                moments[kind] = torch.empty_like(rows).copy_(saved[f"{kind}.{name}"])
            rule = self._rules[name]
            if isinstance(rule, AdamW8bit):
                rule.state[master]["step"] = num_steps
                rule.store(master, *moments.values())
            else:
                step = torch.tensor(float(num_steps), device=master.device)
                rule.state[master].update(moments, step=step)
        self._refresh()

    def _chosen(self, model: nn.Module, optimizer: str) -> list[str]:
        """Return the names of the parameters that `_other` steps."""
        matrices = [name for name, each in self._parameters.items() if each.ndim >= 2]
        if optimizer != "muon":
            return matrices if optimizer in _OTHERS else []
        in_layers = {id(each) for layer in layers_of(model) for each in layer.parameters()}
        shapes = {name: self._parameters[name].shape for name in matrices}
        shapes = {n: x for n, x in shapes.items() if id(self._parameters[n]) in in_layers}
        for name, shape in shapes.items():
            if len(shape) > 2 and min(shape) > 1:
                raise UserError(
                    f"learner.optimizer = 'muon': {name} has the shape {list(shape)}; Muon steps "
                    "matrices, and not yet experts that are one tensor"
                )
        return [name for name, shape in shapes.items() if len(shape) == 2]

    def _moments(self, name: str) -> dict[str, Tensor]:
        """Return a parameter's moments by name, zeros before the first step."""
        rule, master = self._rules[name], self._masters[name]
        if isinstance(rule, AdamW8bit):
            return rule.moments(master)
        is_muon, state = isinstance(rule, torch.optim.Muon), rule.state.get(master, {})
        kinds = ("momentum_buffer",) if is_muon else ("exp_avg", "exp_avg_sq")  # torch's names
        return {kind: state[kind] if kind in state else torch.zeros_like(master) for kind in kinds}

    def _take_gradient(self, master: Tensor, parameter: Tensor) -> None:
        local = self._ranks.local(parameter)
        assert local.data_ptr() == master.data_ptr(), "FSDP has moved a rank's rows"
        master.grad = None if parameter.grad is None else self._ranks.local(parameter.grad)

    def _gradients(self) -> list[Tensor]:
        return [master.grad for master in self._masters.values() if master.grad is not None]

    def _norm(self) -> float:
        local = nn.utils.get_total_norm(self._gradients())
        # In float64 the square and its root are exact.
        return math.sqrt(float(self._ranks.summed(local.double().square().cpu())))

    def _not_finite(self, norm: float) -> str:
        is_broken = [int((~gradient.isfinite()).any()) for gradient in self._gradients()]
        counts = self._ranks.summed(torch.tensor(is_broken)).tolist()
        broken = [name for name, count in zip(self._masters, counts, strict=True) if count]
        return (
            f"the gradient is not finite (norm {norm}) in {len(broken)} of {len(self._masters)} "
            f"parameters, first in {broken[0] if broken else 'none: the norm overflowed'}; a lower "
            "learner.learning_rate or learner.max_grad_norm, or model.dtype: float32, may help"
        )

    def _refresh(self) -> None:
        """Round the masters into the parameters of another dtype."""
        pairs = [(p, self._masters[name]) for name, p in self._parameters.items()]
        rounded = [(p, master) for p, master in pairs if p.dtype != master.dtype]
        if rounded:
            torch._foreach_copy_([p for p, _ in rounded], [m for _, m in rounded])


def _master(parameter: nn.Parameter, compute_dtype: torch.dtype) -> Tensor:
    if compute_dtype == torch.float32:
        parameter.data = parameter.data.float()
        return parameter
    master = parameter.detach().float().clone()
    parameter.register_post_accumulate_grad_hook(partial(_drain, master))
    return master


def _drain(master: Tensor, parameter: nn.Parameter) -> None:
    """Add a gradient that autograd has just computed to the master's float32 sum, and free it."""
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad.add_(parameter.grad)
    parameter.grad = None
