"""`rhymeflow render`: prompts as the policy reads them, decoded from their tokens."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any

from rhymeflow.config import Config
from rhymeflow.data.encode import PromptEncoder
from rhymeflow.data.load import load_prompts
from rhymeflow.data.prompts import Prompt
from rhymeflow.data.text import special_tokens
from rhymeflow.environments import check_calls, tool_schemas
from rhymeflow.environments.template import load_settled

BEGIN, END = "⟦", "⟧"  # stand around a special token

_SAMPLE = Prompt(0, "What is two plus two?", {}, "an example")


def render(config: Config, num_rows: int, *, has_data: bool) -> None:
    """Print the first training prompts, or without data an example, and what a user should know.
    Raises `UserError` where `train` would."""
    from rhymeflow.observe.printable import printable  # loads rich

    tokenizer, settled = load_settled(config)
    prompts = load_prompts(config.data, config.run.seed)[0][:num_rows] if has_data else [_SAMPLE]
    with contextlib.redirect_stdout(sys.stderr):  # what the user's files print
        tools = tool_schemas(config)
    encoder = PromptEncoder(tokenizer, config.data, tools=tools)
    for note in filter(None, (settled, check_calls(config, tokenizer, prompts, tools))):
        print(f"rhymeflow: {note}", file=sys.stderr)
    special = set(tokenizer.convert_tokens_to_ids(special_tokens(tokenizer)))
    for prompt in prompts:
        ids = encoder.encode(prompt)
        print(f"# {prompt.where}: {len(ids):,} tokens")
        print(printable(marked(tokenizer, ids, special)))


def marked(tokenizer: Any, ids: Sequence[int], special: Collection[int]) -> str:
    """Return the text of the tokens, with `BEGIN` and `END` around each special token."""
    text = ""
    for is_special, part in groupby(ids, special.__contains__):
        tokens = list(part)
        if is_special:
            text += "".join(f"{BEGIN}{tokenizer.decode([each])}{END}" for each in tokens)
        else:
            text += tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    return text
