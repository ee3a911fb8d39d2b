"""TRL's names: `from rhymeflow.trl import GRPOConfig, GRPOTrainer` in a script written for TRL.

Configurations are TRL's own. What else such scripts import from `trl` (`TrlParser`,
`ModelConfig`, `get_peft_config`, `rewards` ...) is TRL's, too; its other trainers are not here.
"""

from typing import Any

from rhymeflow.trl.fields import GRPOConfig, RLOOConfig
from rhymeflow.trl.fields import TrlDistillationConfig as DistillationConfig
from rhymeflow.trl.trainer import DistillationTrainer, GRPOTrainer, RLOOTrainer

__all__ = [
    "DistillationConfig", "DistillationTrainer", "GRPOConfig", "GRPOTrainer", "RLOOConfig",
    "RLOOTrainer",
]  # fmt: skip

_DATA_OF_SCRIPTS = "ModelConfig", "DatasetMixtureConfig"


def __getattr__(name: str) -> Any:
    import trl

    if name.endswith(("Trainer", "Config")) and name not in _DATA_OF_SCRIPTS and hasattr(trl, name):
        own = ", ".join(each for each in __all__ if each.endswith("Trainer"))
        raise AttributeError(f"rhymeflow.trl has no {name}: it has {own} (docs/from-trl.md)")
    if name.startswith("_") or name == "experimental" or not hasattr(trl, name):
        raise AttributeError(f"module 'rhymeflow.trl' has no attribute {name!r}")
    return getattr(trl, name)
