"""TRL's names: `from rhymeflow.trl import GRPOConfig, GRPOTrainer` in a script written for TRL.

Holds true: TRL need not be installed. Importing it loads neither torch nor transformers.
"""

from rhymeflow.trl.config import GRPOConfig
from rhymeflow.trl.trainer import GRPOTrainer, TrainOutput

__all__ = ["GRPOConfig", "GRPOTrainer", "TrainOutput"]
