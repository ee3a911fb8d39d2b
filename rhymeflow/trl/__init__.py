"""TRL's names: `from rhymeflow.trl import GRPOConfig, GRPOTrainer` in a script written for TRL.

The configuration is TRL's own, so TRL has to be installed (the extra `trl`).
"""

from rhymeflow.data.files import extra

extra("trl", "rhymeflow.trl", "trl")

from rhymeflow.trl.config import GRPOConfig  # noqa: E402 - it needs TRL
from rhymeflow.trl.trainer import GRPOTrainer, TrainOutput  # noqa: E402

__all__ = ["GRPOConfig", "GRPOTrainer", "TrainOutput"]
