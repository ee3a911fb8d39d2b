"""From a prompt to the tokens the policy is given.

Holds true: one text, tokenized once, from the first system message to the beginning of the answer;
nothing is cut. Knows nothing of torch: the tokenizer is handed in.
"""

from __future__ import annotations

from typing import Any, Protocol

from rhymeflow.config import DataConfig
from rhymeflow.data.prompts import Message, Prompt
from rhymeflow.errors import UserError


class Tokenizer(Protocol):
    """What is asked of a Hugging Face tokenizer."""

    chat_template: Any

    def __call__(self, text: str, /, *, add_special_tokens: bool) -> Any:
        """Return a mapping with `input_ids`."""

    def apply_chat_template(self, conversation: Any, /, **options: Any) -> Any:
        """Return the conversation as one text."""


Schema = dict[str, Any]
"""Of a tool, as a chat template takes it."""

Tools = list[Schema] | dict[str, list[Schema]] | None
"""Of all rows, or by what stands in their column `environment`; None: there are none."""


class PromptEncoder:
    """Encodes prompts of one run.

    Messages, and strings if `data.chat_template` says so, go through the tokenizer's chat template;
    other strings are tokenized as they are, with the tokenizer's own beginning of sequence. A
    prompt whose last message is the assistant's is continued there. `room`: tokens that the model's
    context leaves for a prompt, if that is to be looked at. `tools`: for the chat template to tell.

    Raises:
        UserError: the configuration asks for a chat model and the tokenizer has no template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: DataConfig,
        room: int | None = None,
        tools: Tools = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._room = room
        self._tools = tools
        self._config = config
        has_template = bool(tokenizer.chat_template)
        if config.chat_template and not has_template:
            raise UserError("data.chat_template: the model's tokenizer has no chat template")
        self._has_template = has_template
        self._wraps = has_template if config.chat_template is None else config.chat_template

    def wraps(self, prompt: str | list[Message]) -> bool:
        """Whether the prompt goes through the chat template."""
        return self._wraps or not isinstance(prompt, str)

    def encode(self, prompt: Prompt, tools: list[Schema] | None = None) -> list[int]:
        """Return the prompt's token ids, at least one. `tools`: of this prompt alone.

        Raises:
            UserError: the prompt does not fit the chat template, or is longer than
                `data.max_prompt_length` or the model's context allow.
        """
        if not self.wraps(prompt.prompt):
            text, is_rendered = self._bare(prompt), False
        else:
            text, is_rendered = self._rendered(prompt, tools), True
        text += self._config.assistant_prefix or ""
        # A chat template writes the beginning of the sequence itself.
        encoded = self._tokenizer(text, add_special_tokens=not is_rendered)
        ids = [int(token) for token in encoded["input_ids"]]
        limit = self._config.max_prompt_length
        if limit is not None and len(ids) > limit:
            raise UserError(
                f"{prompt.where}: the prompt is {len(ids)} tokens long, "
                f"data.max_prompt_length = {limit}"
            )
        if self._room is not None and len(ids) > self._room:
            raise UserError(
                f"{prompt.where}: the prompt is {len(ids)} tokens long; the model's context, less "
                f"rollout.max_completion_length, leaves {self._room}"
            )
        if not ids:
            raise UserError(f"{prompt.where}: the prompt has no tokens")
        return ids

    def conversation(self, prompt: Prompt) -> list[Message] | None:
        """The messages that the chat template is given; `None` for text that goes without it."""
        if isinstance(prompt.prompt, str) and not self._wraps:
            return None
        return messages_of(prompt, self._config)

    def _bare(self, prompt: Prompt) -> str:
        assert isinstance(prompt.prompt, str)
        for field in ("system_prompt", "few_shot"):
            if getattr(self._config, field):
                raise UserError(
                    f"data.{field}: text prompts are not wrapped as messages here "
                    "(data.chat_template is off, or the model's tokenizer has none)"
                )
        return prompt.prompt

    def _rendered(self, prompt: Prompt, tools: list[Schema] | None) -> str:
        if not self._has_template:
            raise UserError(
                f"{prompt.where}: the prompt is a list of messages, but the model's tokenizer has "
                "no chat template"
            )
        messages = messages_of(prompt, self._config)
        continues = messages[-1]["role"] == "assistant"
        import jinja2  # the tokenizer's template engine, which is what the error below is of

        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=tools or self._tools_of(prompt),
                tokenize=False,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                **self._config.chat_template_kwargs,
            )
        except jinja2.TemplateError as error:
            raise UserError(
                f"{prompt.where}: the model's chat template refuses the prompt: {error}"
            ) from None
        assert isinstance(text, str)
        return text

    def _tools_of(self, prompt: Prompt) -> list[Schema] | None:
        if not isinstance(self._tools, dict):
            return self._tools
        return self._tools.get(prompt.columns.get("environment", "")) or None


def messages_of(prompt: Prompt, config: DataConfig) -> list[Message]:
    """Return what the chat template is given of a prompt: text is a message of the user's, and
    before it come `data.system_prompt` and `data.few_shot`.

    Raises:
        UserError: the prompt has a system message, and the configuration too.
    """
    messages = prompt.prompt
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    few_shot: list[Message] = [each.model_dump() for each in config.few_shot]
    own = messages[:1] if messages[0]["role"] == "system" else []
    if config.system_prompt is None:
        return [*own, *few_shot, *messages[len(own) :]]
    if own:
        raise UserError(
            f"{prompt.where}: the prompt has a system message of its own, and "
            "data.system_prompt gives another"
        )
    return [{"role": "system", "content": config.system_prompt}, *few_shot, *messages]
