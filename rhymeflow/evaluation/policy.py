"""The policy in this process: model, tokenizer, and engines over them.

Holds true: the model's weights never change. Knows nothing of prompts or rewards.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging

from rhymeflow.config import Config
from rhymeflow.engine.native.engine import Engine
from rhymeflow.histospec.configured import drafter
from rhymeflow.models.load import (
    load_model,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
    stop_token_ids,
)
from rhymeflow.models.rope import settled
from rhymeflow.models.tokenizer import max_length


class Policy:
    """What section `model` names. The weights are loaded when they are first asked for.

    Raises:
        UserError: there is no such model, or it cannot be served.
    """

    def __init__(self, config: Config) -> None:
        self._config, self._whole = config.model, config
        self.tokenizer: Any = load_tokenizer(config.model)
        self.max_length = max_length(config.model)
        """Tokens that a prompt and the response to it can have together."""

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model with its weights."""
        logging.disable_progress_bar()  # the terminal is for what the policy says
        device = resolve_device(self._config)
        dtype = resolve_dtype(self._config, device)
        return settled(load_model(self._config, dtype=dtype, device=device), self._whole)

    @cached_property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end a response."""
        return stop_token_ids(self.model, self.tokenizer)

    def engine(self, config: Config, *, drafts: bool) -> Engine:
        """A new engine, as sections `rollout` and `run` say; `drafts`: siblings for each other."""
        rollout, length = config.rollout, self.max_length
        capacity = rollout.max_kv_tokens
        engine = Engine(
            self.model,
            seed=config.run.seed,
            max_num_seqs=rollout.max_num_seqs,
            max_prefill_tokens=rollout.max_prefill_tokens,
            instance="evaluation",
            version=0,
            kv_capacity=rollout.max_num_seqs * length if capacity is None else capacity,
        )
        engine.prove()
        if drafts:
            engine.draft_with(drafter(config, None, length))
        return engine
