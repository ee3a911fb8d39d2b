"""The prompts of every fake run; nothing has to be loaded."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from rhymeflow.config import Config
from rhymeflow.data.load import RunPrompts
from rhymeflow.data.prompts import Prompt
from rhymeflow.data.stream import PromptStream
from rhymeflow.runtime.reporting import Reporter
from rhymeflow.runtime.train import Loaded
from rhymeflow.suites.suite import SuitePrompts, of_run

NUM_PROMPTS, HELD_OUT = 7, 2


class Letters:
    """A prompt's tokens."""

    def encode(self, prompt: Prompt) -> list[int]:
        """One for each letter."""
        return [ord(letter) for letter in str(prompt.prompt)]


SOURCE = [Prompt(row, "ab" * (row + 1), {"answer": row}) for row in range(NUM_PROMPTS)]
ANSWERS = [Prompt(row, "q" * (row + 1), {}) for row in range(HELD_OUT)]


def load(start: Callable[[], None], config: Config, reporter: Reporter) -> Loaded:
    """The prompts of every fake run; see `runtime.train.Machine`."""
    start()
    held_out = ANSWERS[: config.data.eval_size]
    stream = PromptStream(SOURCE, config.run.seed, config.data.shuffle)
    ids = [Letters().encode(prompt) for prompt in ANSWERS]
    suites = {each.name: SuitePrompts(each, ANSWERS, ids, Letters()) for each in of_run(config)}
    prompts = RunPrompts(SOURCE, stream, Letters(), held_out)
    return Loaded(SimpleNamespace(chat_template=None), prompts, suites)
