"""TRL's names: `from rhymeflow.trl import GRPOConfig, GRPOTrainer` in a script written for TRL.

The configuration is TRL's own.
"""

from rhymeflow.trl.fields import GRPOConfig as GRPOConfig
from rhymeflow.trl.trainer import GRPOTrainer as GRPOTrainer
