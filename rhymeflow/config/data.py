"""Section `data`: prompts to train on and to hold out."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from rhymeflow.config.section import NonNegative, Positive, Section

_NO_VARIABLES = {
    "conversation", "messages", "tools", "tokenize", "add_generation_prompt",
    "continue_final_message", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip
"""Arguments of transformers' `apply_chat_template` that the run itself gives."""


class ExampleMessage(Section):
    """A chat message of `data.few_shot`."""

    role: Literal["user", "assistant", "tool"]
    """Who says it."""
    content: str
    """Its text, in which a tool is called as the policy is to call it."""


class DataConfig(Section):
    """Prompts to train on and to hold out."""

    by_name = "source"

    source: str = "recipe:demo"
    """A CSV, TSV, JSON, JSONL or Parquet file (the text formats also as `.gz`, `.bz2`, `.xz` or
    `.zst`), a directory saved by Hugging Face `datasets`, `reasoning_gym:NAME`, or `recipe:NAME`
    (the task of a recipe)."""
    options: dict[str, Any] = {}
    """Passed on to a task generator, such as `{min_terms: 2}` for reasoning_gym's `chain_sum`."""
    size: Positive | None = None
    """Number of training prompts; `None` takes all of a file. Generators need a number, of a
    million at most."""
    eval_source: str | None = None
    """Held-out prompts. `None`: a generator makes further, distinct problems; a file gives its last
    `eval_size` rows, which are then not trained on."""
    eval_size: NonNegative | None = None
    """Number of held-out prompts; 0 switches evaluation off. `None`: 64, but of the file that is
    trained on at most a tenth of the rows, and of `eval_source` at most all of them."""
    prompt_column: str = "prompt"
    """Column that holds the prompt: a string or a list of chat messages."""
    system_prompt: str | None = None
    """Put before every prompt as a system message (chat models only)."""
    few_shot: tuple[ExampleMessage, ...] = ()
    """Worked examples, as chat messages: put before every prompt, after its system message (chat
    models only). The last is the assistant's. Reward functions do not see them."""
    assistant_prefix: str | None = None
    """Put after every prompt as the beginning of the answer. Part of the prompt: rewards see what
    the policy adds to it."""
    max_prompt_length: Positive | None = None
    """Longest prompt in tokens; a longer one is refused with its row, never cut silently. With this
    and the longest response, a model with LongRoPE chooses its factors, once for the run; without
    it, for its whole context."""
    shuffle: bool = True
    """A new order each epoch, from the run's seed."""
    chat_template: bool | None = None
    """Whether string prompts are wrapped as a user message. `None`: if the tokenizer has one."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, such as `{enable_thinking: false}`; `chat_template` names one
    of several."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_variables(cls, given: dict[str, Any]) -> dict[str, Any]:
        if taken := _NO_VARIABLES & given.keys():
            raise ValueError(f"{min(taken)!r} is no variable of the template; it is given already")
        return given

    @field_validator("few_shot")
    @classmethod
    def _ends_with_an_answer(
        cls, messages: tuple[ExampleMessage, ...]
    ) -> tuple[ExampleMessage, ...]:
        if messages and messages[-1].role != "assistant":
            raise ValueError("the last message is to be the assistant's")
        return messages
