"""`GRPOConfig`: TRL's own, with one field more."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
import trl

from rhymeflow.errors import UserError, suggestion

REMOVED = {
    "max_prompt_length": "give rhymeflow={'data.max_prompt_length': N}; a longer prompt is refused "
    "with its row, not cut",
    "warmup_ratio": "warmup_steps takes a share below 1, too",
}
"""Fields that scripts for earlier versions of TRL give, and what to do."""


@dataclasses.dataclass(init=False)
class GRPOConfig(trl.GRPOConfig):
    """TRL's `GRPOConfig`; docs/from-trl.md says what becomes of its fields.

    `rhymeflow` is the one field more, a mapping of fields of ours, which win:
    `{"schedule.name": "synchronous"}`.

    Raises `UserError` for a name that is no field, and for what TRL refuses.
    """

    rhymeflow: dict[str, Any] | str | None = None

    def __init__(self, *arguments: Any, rhymeflow: Any = None, **named: Any) -> None:
        check_one_process()
        known = [each.name for each in dataclasses.fields(self)]
        for name in named:
            if name in REMOVED:
                gone = f"{name}: TRL has no such field any more; {REMOVED[name]}"
                raise UserError(f"GRPOConfig: {gone}")
            if name not in known:
                raise UserError(f"GRPOConfig: there is no field {name!r}{suggestion(name, known)}")
        self.rhymeflow = rhymeflow
        if not torch.cuda.is_available():  # TRL refuses such a machine unless it is told
            named.setdefault("use_cpu", True)
        try:
            super().__init__(*arguments, **named)
        except ValueError as error:
            raise UserError(f"GRPOConfig: {' '.join(str(error).split())}") from None


def check_one_process() -> None:
    """Raise `UserError` in a script that `torchrun` or `accelerate launch` started."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "GRPOTrainer: the script was started as several processes (WORLD_SIZE is "
            f"{os.environ['WORLD_SIZE']}); start it once, by python: a run starts its own, "
            "rhymeflow={'learner.num_ranks': N, 'rollout.num_instances': M}"
        )
