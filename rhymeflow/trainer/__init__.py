"""A run from Python objects; `Trainer` is the entry point. Loads neither torch nor transformers."""

from rhymeflow.trainer.trainer import Trainer as Trainer
