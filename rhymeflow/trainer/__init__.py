"""Starts runs from Python objects, with `Trainer`. Loads neither torch nor transformers."""

from rhymeflow.trainer.trainer import Trainer as Trainer
