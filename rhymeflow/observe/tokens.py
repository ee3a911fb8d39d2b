"""Texts of single tokens, by the tokenizer of their run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rhymeflow.errors import UserError
from rhymeflow.store.previous_run import section_in_force
from rhymeflow.store.reader import TrajectoryReader

if TYPE_CHECKING:
    from rhymeflow.config import ModelConfig

Texts = Callable[[list[int]], list[str]]


def load_texts(model: ModelConfig) -> Texts:
    """What makes a text of each token; `UserError` if the tokenizer is not on this machine."""
    from rhymeflow.models.tokenizer import load_tokenizer  # loads transformers

    tokenizer = load_tokenizer(model)
    return lambda tokens: [
        str(tokenizer.decode([token], skip_special_tokens=False)) for token in tokens
    ]


class TokenTexts:
    """Keeps the tokenizers of runs, each loaded when it is first asked for; for many threads."""

    def __init__(self, load: Callable[[ModelConfig], Texts] = load_texts) -> None:
        self._load, self._lock = load, threading.Lock()
        self._known: dict[Path, Texts | None] = {}

    def of(self, reader: TrajectoryReader, tokens: list[int]) -> list[str] | None:
        """A text for each token; None if the run's tokenizer cannot be had here: who shows them
        says that there are numbers only."""
        with self._lock:
            if reader.path not in self._known:
                if not reader.attempts():
                    return None
                try:
                    self._known[reader.path] = self._load(section_in_force(reader, "model"))
                except UserError:
                    self._known[reader.path] = None
            texts = self._known[reader.path]
        return None if texts is None else texts(tokens)
