"""Environments: what answers the policy between its turns, run without trusting it.

`Environment` is what a user writes; classes with tools for methods, as in TRL, and plain functions
do as well. Importing this loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rhymeflow.config import Config
from rhymeflow.core.types import SuiteName
from rhymeflow.data.encode import PromptEncoder, Tools
from rhymeflow.data.prompts import Message as Message
from rhymeflow.data.prompts import Prompt, kind_of
from rhymeflow.suites.suite import RUN, environment_sections, of_run, uses_environments
from rhymeflow.utils.user_modules import check_file, names_file


class Environment:
    """Answers one response of the policy, turn by turn. Each response gets an object of its own.

    A class with these methods need not derive from it. Each may be `async def`; those that are not
    run in a thread of the environment's own, always the same one.

    It may be made anew and brought to where it was by `reset` and the same turns, after which its
    answers must be what they were: whatever is random comes from `seed`.
    """

    def reset(self, **columns: Any) -> str | None:
        """Begin, with the columns of the prompt's row that the signature names (`**` takes all).

        If it names `seed`, it is given an int made of `run.seed`, the row and the epoch, the same
        for all responses to the prompt; if it names `prompt`, the prompt. A column of
        such a name takes precedence. Text that it returns is put after the prompt (after its last
        message of the user's).
        """
        return None

    def step(self, messages: list[Message]) -> list[Message] | str | None:
        """Answer the last of `messages`, the conversation so far, which is the policy's turn.

        Text is a message of the user's, or, where the prompt is text and not a conversation, what
        the policy reads as it is. None: the episode is over.
        """
        raise NotImplementedError

    def reward(self) -> float | None:
        """Judge the episode, which is over; None: it has no reward of the environment's."""
        return None

    def close(self) -> None:
        """Give back what it has. Called once, whatever happened before."""


def tool_schemas(config: Config) -> Tools:
    """Return what the policy is told of its tools, as `PromptEncoder` takes it.

    Imports the user's classes and tools, and, if there are any, torch.
    """
    from rhymeflow.environments.kinds import load_kinds

    kinds = load_kinds(config.environment)
    if len(kinds) == 1:
        return kinds[0].schemas() or None
    by_name = {kind.name: kind.schemas() for kind in kinds}
    return by_name if any(by_name.values()) else None


def all_tool_schemas(config: Config) -> dict[SuiteName, Tools]:
    """The same of the run (`suites.suite.RUN`), and of each suite that it evaluates."""
    found = {RUN: tool_schemas(config)}
    for each in of_run(config):
        has_own = each.section.environments is not None
        found[each.name] = tool_schemas(each.config) if has_own else found[RUN]
    return found


def tool_schemas_apart(config: Config) -> dict[SuiteName, Tools]:
    """The same, found in a process of its own: this one imports nothing of the user's."""
    if not uses_environments(config):
        return {}
    from rhymeflow.utils.child import apart  # not above: the controller knows no processes

    sections = environment_sections(config).values()
    names = [each.environment for section in sections for each in section.classes]
    names += config.environment.tools
    found: dict[SuiteName, Tools]
    found = apart(all_tool_schemas, config, names)
    return found


def check_names(config: Config) -> None:
    """Look whether there are files that define the classes and tools; runs nothing of them."""
    sections = environment_sections(config).values()
    classes = [each.environment for section in sections for each in section.classes]
    for what, specs in (("environment", classes), ("tool", config.environment.tools)):
        for spec in filter(names_file, specs):
            check_file(spec, f"{what} {spec}")


def check_calls(config: Config, tokenizer: Any, prompts: Sequence[Prompt], tools: Tools) -> None:
    """Look whether calls of these tools are read as the chat template writes them, if prompts go
    through it. Answers of environments without tools are looked at where they run."""
    from rhymeflow.environments.rendering import ChatRenderer

    schemas = tools.values() if isinstance(tools, dict) else [tools]
    wraps, variables = PromptEncoder(tokenizer, config.data).wraps, config.data.chat_template_kwargs
    if any(schemas) and any(wraps(each.prompt) for each in prompts[:100]):
        for each in filter(None, schemas):
            ChatRenderer(tokenizer, each, reads_users=False, variables=variables)


def check_rows(config: Config, prompts: Sequence[Prompt]) -> None:
    """Look whether rows name their environments, where there are several."""
    names = [each.reward_name for each in config.environment.classes]
    for each in prompts:
        kind_of(names, each.columns, each.where)
