"""Answers as a plain Hugging Face model gives them, one token at a time, without any engine."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rhymeflow import recipes
from rhymeflow.engine.base import NoiseKey
from rhymeflow.engine.native import noise

EVALUATION = 2**31 - 1
"""The epoch of the noise of held-out answers."""


class Oracle:
    """The model of a recipe, in float32."""

    def __init__(self, recipe: str) -> None:
        directory = recipes.directory(recipe)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        )
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text)["input_ids"]

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def turn(
        self, prompt: str, tokens: list[int], row: int, sample: int, temperature: float, most: int
    ) -> list[int]:
        """What comes after `tokens`, up to the end of the turn or `most` tokens in all."""
        made, stream = list(tokens), noise.stream(0, NoiseKey(row, EVALUATION, sample))
        while len(made) < most:
            ids = torch.tensor([self.ids(prompt) + made])
            with torch.no_grad():
                logits = self.model(ids).logits[0, -1]
            if temperature:
                keys = noise.row_keys([stream], [len(made)], torch.device("cpu"))
                gumbel = -noise.exponentials(keys, len(logits))[0].log()
                logits = (logits / temperature).double() + gumbel
            made.append(int(logits.argmax()))
            if made[-1] == self.tokenizer.eos_token_id:
                break
        return made[len(tokens) :]
