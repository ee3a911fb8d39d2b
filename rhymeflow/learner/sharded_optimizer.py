"""AdamW on a sharded model's float32 masters: each rank steps the rows that it has.

Holds true: the same step as `optimizer.Optimizer` takes on the whole, up to the order of sums; the
gradient is clipped by its norm over all ranks; every rank takes the step or none does. Every rank
has to make the same calls. Knows nothing of losses or checkpoints' files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rhymeflow.config import LearnerConfig
from rhymeflow.learner.optimizer import AnyOptimizer
from rhymeflow.learner.sharded_model import ShardedModel

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's, by torch's names."""


class ShardedOptimizer(AnyOptimizer):
    """Owns AdamW's moments for the parameters of `sharded`. Every rank steps or skips with all."""

    def __init__(self, sharded: ShardedModel, config: LearnerConfig) -> None:
        self._ranks = sharded.ranks
        trained = {n: each for n, each in sharded.parameters.items() if each.requires_grad}
        super().__init__(trained, config)

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken."""
        state = next(iter(self._adamw.state.values()), None)
        return 0 if state is None else int(state["step"])

    def shards(self) -> Iterator[tuple[str, str, Tensor]]:
        """What is saved: kind (`master` or a moment), parameter's name, and this rank's rows."""
        for name, master in self._masters.items():
            yield "master", name, master.detach().to_local()
            for kind in MOMENTS:
                moment = self._adamw.state.get(master, {}).get(kind)
                local = torch.zeros_like(master) if moment is None else moment
                yield kind, name, local.detach().to_local()

    @torch.no_grad()
    def load(self, num_steps: int, read: Callable[[str, str], Tensor]) -> None:
        """Take over what was saved: `read(kind, name)` returns this rank's rows."""
        for name, master in self._masters.items():
            master.to_local().copy_(read("master", name))
            state = self._adamw.state[master]
            device = master.to_local().device
            state["step"] = torch.tensor(float(num_steps), dtype=torch.float32, device=device)
            for kind in MOMENTS:
                state[kind] = torch.zeros_like(master)
                state[kind].to_local().copy_(read(kind, name))

    def _gradients(self) -> list[Tensor]:
        """This rank's rows."""
        return [g for m in self._masters.values() if (g := m.grad.to_local()).numel()]

    def _norm(self) -> float:
        """Over all ranks."""
        gradients = self._gradients()
        norms = torch._foreach_norm(gradients) if gradients else []
        squares = [norm.double().square() for norm in norms]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        return math.sqrt(float(self._ranks.summed(total.cpu())))

    def _apply(self, divisor: float) -> None:
        if gradients := self._gradients():
            torch._foreach_div_(gradients, divisor)
        self._adamw.step()

    def _broken(self) -> list[str]:
        """Names of parameters whose gradient is not finite on any rank."""
        masters = self._masters.values()
        counts = torch.tensor([int((~m.grad.to_local().isfinite()).any()) for m in masters])
        found = self._ranks.summed(counts).tolist()
        return [name for name, count in zip(self._masters, found, strict=True) if count]


__all__ = ["MOMENTS", "ShardedOptimizer"]
