"""Prompts: where they come from, in which order they are requested, how they become tokens.

Knows nothing of torch, of models, or of what becomes of a prompt. The tokenizer is handed in.
"""

from rhymeflow.data.encode import PromptEncoder
from rhymeflow.data.load import load_prompts
from rhymeflow.data.prompts import Prompt, PromptSource
from rhymeflow.data.stream import PromptStream

__all__ = ["Prompt", "PromptEncoder", "PromptSource", "PromptStream", "load_prompts"]
