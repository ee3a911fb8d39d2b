"""`rhymeflow generate`: streams a model's answer to a prompt, or its answers in a conversation.

Tokens are those that the engine of a run samples from the same prompt, noise and sampling
parameters. Each answer of a conversation has its own noise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial

from transformers import PreTrainedModel
from transformers.utils import logging

from rhymeflow.config import Config
from rhymeflow.data.encode import PromptEncoder
from rhymeflow.data.prompts import Message, Prompt
from rhymeflow.data.text import StopTexts
from rhymeflow.engine.base import NoiseKey, Request, Sampling
from rhymeflow.engine.native.engine import Engine
from rhymeflow.environments.template import load_settled
from rhymeflow.errors import UserError
from rhymeflow.histospec.noise_sharing import EVALUATION_EPOCH
from rhymeflow.models.load import check_native, resolve_dtype, stop_token_ids
from rhymeflow.models.lora import load_policy
from rhymeflow.models.precision import resolve_device
from rhymeflow.models.rope import fix_longrope
from rhymeflow.models.tokenizer import max_length

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes the bytes of an incomplete character to."""


class TextStream:
    """Decodes a growing list of tokens piece by piece; `decode` decodes a whole list."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._handed_out = ""

    def more(self, tokens: list[int]) -> str:
        """Return the text that was not returned before; `tokens` are all tokens so far."""
        text = self._decode(tokens).rstrip(INCOMPLETE)
        # If the text does not continue what was returned, the next token may complete a character.
        return self._new(text) if text.startswith(self._handed_out) else ""

    def rest(self, tokens: list[int]) -> str:
        """Return the rest of the text, once `tokens` are complete."""
        return self._new(self._decode(tokens))

    def _new(self, text: str) -> str:
        new = text[len(self._handed_out) :]
        self._handed_out = text
        return new


class Generator:
    """Answers prompts with the model of `config`, one after the other.

    Sampling parameters, length and seed are those of `config`. `must_fit`: refuse a prompt that
    leaves no room for that length; else the response is shorter. If the model has a chat template,
    text becomes the user's message, after `data.system_prompt`. Raises `UserError` if there is no
    such model, or it has no chat template and needs one."""

    def __init__(self, config: Config, *, must_fit: bool) -> None:
        self._config, self._must_fit = config, must_fit
        check_native(config.model, "`rhymeflow eval` samples from it with rollout.engine = 'vllm'")
        self._tokenizer, _ = load_settled(config)
        self._max_length = max_length(config.model)
        self.encoder = PromptEncoder(self._tokenizer, config.data)
        self._num_prompts = 0

    @cached_property
    def _model(self) -> PreTrainedModel:
        logging.disable_progress_bar()  # the terminal is for the policy's text
        section = self._config.model
        device = resolve_device(section)
        dtype = resolve_dtype(section, device)
        return fix_longrope(load_policy(section, dtype=dtype, device=device), self._config)

    @cached_property
    def _engine(self) -> Engine:
        rollout = self._config.rollout
        engine = Engine(
            self._model,
            seed=self._config.run.seed,
            max_num_seqs=1,
            max_prefill_tokens=rollout.max_prefill_tokens,
            instance="generate",
            version=0,
            kv_capacity=self._max_length,
        )
        engine.prove()
        return engine

    def request(self, prompt: str | list[Message]) -> Request:
        """Return the engine's request for the next prompt. Raises `UserError` if the prompt is
        empty or too long, or the chat template refuses it."""
        ids = self.encoder.encode(Prompt(0, prompt, {}, "the prompt"))
        rollout = self._config.rollout
        wanted, room = rollout.max_completion_length, self._max_length - len(ids)
        if room < 1 or (self._must_fit and wanted > room):
            asked = f"; rollout.max_completion_length = {wanted:,}" if self._must_fit else ""
            raise UserError(
                f"the prompt has {len(ids):,} tokens, which in the model's context of "
                f"{self._max_length:,} leaves {max(room, 0):,} for a response{asked}"
            )
        sampling = Sampling(
            rollout.temperature,
            rollout.top_p,
            rollout.top_k,
            min(wanted, room),
            stop_token_ids(self._model, self._tokenizer),
        )
        noise = NoiseKey(self._num_prompts, EVALUATION_EPOCH, 0)
        self._num_prompts += 1
        stops = StopTexts(self._tokenizer.decode, rollout.stop) if rollout.stop else None
        return Request(self._num_prompts, ids, noise, sampling, stop_texts=stops)

    def answer(self, prompt: str | list[Message]) -> Iterator[str]:
        """Yield the text of the answer, piece by piece, as it is generated; see `request`."""
        request = self.request(prompt)
        self._engine.submit(request)
        decode = partial(
            self._tokenizer.decode,
            skip_special_tokens=self._config.rollout.skip_special_tokens,
            clean_up_tokenization_spaces=False,  # it would remove blanks that were returned
        )
        stream = TextStream(decode)
        while self._engine.has_work:
            self._engine.step()
            if piece := stream.more(request.tokens):
                yield piece
        if piece := stream.rest(request.tokens):
            yield piece


def chat(generator: Generator, inputs: Iterable[str], write: Callable[[str], None]) -> None:
    """Answer the user's messages one by one, each after those before. Raises `UserError` if the
    model has no chat template, or the conversation becomes too long."""
    if not generator.encoder.wraps("text"):
        raise UserError("--chat: the model's tokenizer has no chat template; give one prompt")
    messages: list[Message] = []
    for text in inputs:
        if not text.strip():
            continue
        messages.append({"role": "user", "content": text})
        pieces = []
        for piece in generator.answer(messages):
            write(piece)
            pieces.append(piece)
        write("\n")
        messages.append({"role": "assistant", "content": "".join(pieces)})
