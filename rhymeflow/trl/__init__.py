"""TRL's names: `from rhymeflow.trl import GRPOConfig, GRPOTrainer` in a script written for TRL.

The configuration is TRL's own, so TRL has to be installed (the extra `trl`).
"""

from rhymeflow.data.files import extra

extra("trl", "rhymeflow.trl", "trl")

from rhymeflow.trl.fields import GRPOConfig as GRPOConfig  # noqa: E402 - it needs TRL
from rhymeflow.trl.trainer import GRPOTrainer as GRPOTrainer  # noqa: E402
