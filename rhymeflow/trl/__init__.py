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
_REMOVED = {
    "get_kbit_device_map": "leave device_map out, for a run places its models",
    "setup_chat_format": "use clone_chat_template",
}
"""Names that TRL has removed, and what to do instead."""


def __getattr__(name: str) -> Any:
    import trl

    if name in _REMOVED and not hasattr(trl, name):
        raise ImportError(f"rhymeflow.trl has no {name}, nor has TRL any more: {_REMOVED[name]}")
    is_trainers = name.endswith(("Trainer", "Config")) and name not in _DATA_OF_SCRIPTS
    if name == "experimental" or (is_trainers and hasattr(trl, name)):
        own = ", ".join(each for each in __all__ if each.endswith("Trainer"))
        raise ImportError(  # of an `AttributeError`, `from rhymeflow.trl import` shows no word
            f"rhymeflow.trl has no {name}: it trains by {own}, and `rhymeflow sft` fine-tunes; "
            f"what does not train with them needs `from trl import {name}` (docs/from-trl.md)"
        )
    if name.startswith("_") or not hasattr(trl, name):
        raise AttributeError(f"module 'rhymeflow.trl' has no attribute {name!r}")
    return getattr(trl, name)
