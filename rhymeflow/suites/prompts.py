"""The prompts of the suites that a run evaluates, in tokens.

Holds true: the same configuration, seed and tokenizer give the same prompts; every one fits the
model together with the longest answer to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rhymeflow.config import Config
from rhymeflow.core.types import SuiteName
from rhymeflow.data.encode import PromptEncoder, Tokenizer, Tools
from rhymeflow.data.prompts import PromptSource
from rhymeflow.errors import UserError
from rhymeflow.suites.suite import Suite, of_run


@dataclass(frozen=True)
class SuitePrompts:
    """A suite with its prompts, and their tokens by row."""

    suite: Suite
    prompts: PromptSource
    prompt_ids: list[list[int]]
    encoder: PromptEncoder


def load_suites(
    config: Config,
    held_out: PromptSource | None,
    tokenizer: Tokenizer,
    max_length: int,
    tools: Mapping[SuiteName, Tools],
) -> dict[SuiteName, SuitePrompts]:
    """Read and encode the prompts of the suites that a run of `config` evaluates, by their names.

    Args:
        config: of the run.
        held_out: the run's held-out prompts, where they are loaded already.
        tokenizer: the model's.
        max_length: the model's context.
        tools: of each suite, what the chat template is told of them.

    Raises:
        UserError: prompts cannot be had, or do not fit the model.
    """
    found = {}
    for suite in of_run(config):
        longest = suite.config.rollout.max_completion_length
        if longest >= max_length:
            raise UserError(
                f"suite {suite.name}: max_completion_length = {longest} leaves no room for a "
                f"prompt in the model's context of {max_length} tokens"
            )
        data = suite.config.data
        encoder = PromptEncoder(tokenizer, data, max_length - longest, tools.get(suite.name))
        prompts = suite.prompts(held_out)
        ids = [encoder.encode(prompts[row]) for row in range(len(prompts))]
        found[suite.name] = SuitePrompts(suite, prompts, ids, encoder)
    return found
