"""Section `data`: training prompts and held-out prompts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from rhymeflow.config.section import NonNegative, Positive, Section

_NO_VARIABLES = {
    "conversation", "messages", "tools", "tokenize", "add_generation_prompt",
    "continue_final_message", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip
"""Arguments of transformers' `apply_chat_template` that are no variables of the template."""


class ExampleMessage(Section):
    """A chat message of `data.few_shot`."""

    role: Literal["user", "assistant", "tool"]
    """Author of the message."""
    content: str
    """Text of the message. A tool call is written as the policy should write it."""


class DataConfig(Section):
    """Training prompts and held-out prompts."""

    by_name = "source"

    source: str = "recipe:demo"
    """A CSV, TSV, JSON, JSONL or Parquet file (the text formats also as `.gz`, `.bz2`, `.xz` or
    `.zst`), a directory saved by Hugging Face `datasets`, `reasoning_gym:NAME`, or `recipe:NAME`
    (the task of a recipe)."""
    options: dict[str, Any] = {}
    """Keyword arguments of a task generator, such as `{min_terms: 2}`."""
    size: Positive | None = None
    """Number of training prompts, for generators at most a million. `None` takes all of a file."""
    eval_source: str | None = None
    """Source of held-out prompts. `None`: other problems of the same generator, or the last
    `eval_size` rows of the file, which are then not trained on."""
    eval_size: NonNegative | None = None
    """Number of held-out prompts; 0 switches evaluation off. `None`: 64, but at most a tenth of the
    training file's rows, or all rows of `eval_source`."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string or a list of chat messages."""
    system_prompt: str | None = None
    """Put before every prompt as a system message (chat models only)."""
    few_shot: tuple[ExampleMessage, ...] = ()
    """Chat messages with worked examples, put before every prompt and after its system message
    (chat models only). The last must be the assistant's. Reward functions do not see them."""
    assistant_prefix: str | None = None
    """Beginning of the answer, put after every prompt. It is part of the prompt: rewards see what
    the policy adds to it."""
    max_prompt_length: Positive | None = None
    """Longest prompt in tokens; a longer one is an error that names its row. A model with LongRoPE
    chooses its factors once for the run, by the sum of this and the longest response; `None`: by
    its whole context."""
    shuffle: bool = True
    """Whether each epoch has a new order, drawn from `run.seed`."""
    chat_template: bool | None = None
    """Whether string prompts become user messages. `None`: if the tokenizer has a template."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the template, as `{enable_thinking: false}`; `chat_template` selects one."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_variables(cls, given: dict[str, Any]) -> dict[str, Any]:
        if taken := _NO_VARIABLES & given.keys():
            raise ValueError(f"{min(taken)!r} is no variable of the template: the run sets it")
        return given

    @field_validator("few_shot")
    @classmethod
    def _ends_with_an_answer(
        cls, messages: tuple[ExampleMessage, ...]
    ) -> tuple[ExampleMessage, ...]:
        if messages and messages[-1].role != "assistant":
            raise ValueError("the last message should be the assistant's")
        return messages
