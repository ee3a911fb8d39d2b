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
"""Arguments of transformers' `apply_chat_template` that are not template variables."""


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
    `.zst`), a directory saved by Hugging Face `datasets`, `reasoning_gym:NAME`, `recipe:NAME` (the
    task of a recipe), or `verifiers:NAME` (a taskset of verifiers)."""
    options: dict[str, Any] = {}
    """Keyword arguments of a task generator, such as `{min_terms: 2}`. Of `verifiers:NAME`: section
    `env` of its configuration, and `python`, an interpreter that has verifiers."""
    size: Positive | None = None
    """Number of training prompts; generators need it, at most a million. `None`: the whole file."""
    eval_source: str | None = None
    """Source of held-out prompts. `None`: other problems of the same generator, or the last
    `eval_size` rows of the file, which are then not trained on."""
    eval_size: NonNegative | None = None
    """Number of held-out prompts; 0 switches evaluation off. `None`: 64, or fewer: at most a tenth
    of the rows if they are held out of the training file, at most all rows of an `eval_source`
    file."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string or a list of chat messages."""
    system_prompt: str | None = None
    """Put before every prompt as a system message (chat models only)."""
    few_shot: tuple[ExampleMessage, ...] = ()
    """Chat messages with worked examples, put before every prompt and after its system message
    (chat models only). The last must be the assistant's. Reward functions do not see them."""
    assistant_prefix: str | None = None
    """Beginning of the response, put after every prompt. It is part of the prompt: reward functions
    see only what the policy adds to it."""
    max_prompt_length: Positive | None = None
    """Longest prompt in tokens; a longer one is an error that names its row. `None`: what the
    model's context leaves beside the longest response. A model with LongRoPE chooses its factors
    once for the run: by the sum of this and the longest response, or if this is `None`, by its
    whole context."""
    shuffle: bool = True
    """Whether each epoch has a new order, drawn from `run.seed`."""
    chat_template: bool | str | None = None
    """Whether string prompts become user messages. `None`: only if the tokenizer has a template.
    A Jinja file, or that of `recipe:NAME`, is used in place of the tokenizer's template, and string
    prompts become user messages."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables passed to the chat template, such as `{enable_thinking: false}`. The key
    `chat_template` selects one of a tokenizer's several templates, unlike `data.chat_template`."""

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
