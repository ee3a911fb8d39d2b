"""A run from Python objects; `Trainer` is the entry point.

Importing it loads neither torch nor transformers.
"""

from rhymeflow.trainer.trainer import Trainer

__all__ = ["Trainer"]
