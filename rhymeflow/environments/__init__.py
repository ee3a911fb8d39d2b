"""Environments, which answer the policy between its turns; their code is not trusted.

Users write a class like `Environment`, a class whose methods are tools, as in TRL, or plain
functions that are tools; or a program that calls the policy (`agents.py`). Importing this module
loads no torch.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from typing import Any

from rhymeflow import recipes
from rhymeflow.config import Config
from rhymeflow.core.types import SuiteName
from rhymeflow.data.encode import PromptEncoder, Tools
from rhymeflow.data.generators import VERIFIERS
from rhymeflow.data.prompts import Message as Message
from rhymeflow.data.prompts import Prompt, kind_of
from rhymeflow.errors import UserError
from rhymeflow.suites.suite import RUN, environment_sections, of_run, uses_environments
from rhymeflow.utils.user_modules import check_file, names_file

MCP = "mcp:"
"""Before the command or URL of a server whose tools are the policy's."""


class Environment:
    """Answers one response of the policy, turn by turn. Each response gets its own object.

    A class with these methods need not derive from it. Methods may be `async def`; the others run
    in one thread of the object.

    A new object may replace a lost one: it is reset and given the same turns, and must give the
    same answers. So all randomness must come from `seed`.
    """

    def reset(self, **columns: Any) -> str | None:
        """Begin an episode. Arguments are columns of the prompt's row (`**` takes all).

        An argument `seed` gets an int made of `run.seed`, the row and the epoch, the same for all
        responses to the prompt; an argument `prompt` gets the prompt. A column of either name takes
        precedence. Returned text is put after the prompt (after its last message of the user).
        """
        return None

    def step(self, messages: list[Message]) -> list[Message] | str | None:
        """Answer the policy's turn, the last of `messages`, which are the conversation so far.

        Text becomes a message of the user, or if the prompt is text and not a conversation, the
        policy reads it as it is. None ends the episode.
        """
        raise NotImplementedError

    def reward(self) -> float | None:
        """Return the reward of the finished episode, or None if the environment gives none."""
        return None

    def close(self) -> None:
        """Release resources. Called exactly once, also after errors."""


def tool_schemas(config: Config) -> Tools:
    """Return the schemas of the policy's tools for `PromptEncoder`.

    Imports the user's classes and tools, and, if there are any, torch.
    """
    from rhymeflow.environments.kinds import load_kinds

    kinds = load_kinds(config.environment)
    if len(kinds) == 1:
        return kinds[0].schemas() or None
    by_name = {kind.name: kind.schemas() for kind in kinds}
    return by_name if any(by_name.values()) else None


def all_tool_schemas(config: Config) -> dict[SuiteName, Tools]:
    """Return `tool_schemas` of the run (`suites.suite.RUN`) and of each suite that it evaluates."""
    schemas = {RUN: tool_schemas(config)}
    for each in of_run(config):
        has_environments = each.section.environments is not None
        schemas[each.name] = tool_schemas(each.config) if has_environments else schemas[RUN]
    return schemas


def tool_schemas_apart(config: Config) -> dict[SuiteName, Tools]:
    """Return `all_tool_schemas`; another process runs the user's code."""
    has_program = config.environment.agent is not None and not config.environment.plays_classes
    if not uses_environments(config) or has_program:
        return {}
    from rhymeflow.utils.child import call_in_process  # not above: it imports multiprocessing

    sections = environment_sections(config).values()
    names = [each.environment for section in sections for each in section.classes]
    names += config.environment.tools
    return call_in_process(all_tool_schemas, config, names)


def check_names(config: Config) -> None:
    """Check, without running them, that files define the classes, the tools and the agent's
    function, and that its command is there. Raises `UserError`."""
    if (agent := config.environment.agent) is not None and not config.environment.plays_classes:
        _check_agent(agent, config.environment.agent_python)
    sections = environment_sections(config).values()
    classes = [each.environment for section in sections for each in section.classes]
    for what, specs in (("environment", classes), ("tool", config.environment.tools)):
        for spec in specs:
            if what == "tool" and spec.startswith(MCP):
                from rhymeflow.environments.mcp_tools import check_server  # it imports asyncio

                check_server(spec)
            elif names_file(spec):
                check_file(spec, f"{what} {spec}")


def program_of(agent: str | tuple[str, ...]) -> str | list[str]:
    """Return `environment.agent` as `path/to/file.py:function`, or as the words of a command.
    Raises `UserError` if a recipe has none."""
    if not isinstance(agent, str):
        return list(agent)
    file = VERIFIERS if agent == "verifiers" else recipes.file_of(agent, "agent.py")
    if file is not None:
        return f"{file}:solve"
    return agent if ".py:" in agent else shlex.split(agent)


def _check_agent(agent: str | tuple[str, ...], python: str | None) -> None:
    program = program_of(agent)
    if isinstance(program, str):
        check_file(program, f"environment.agent {agent}")
    elif python is not None:
        raise UserError(
            "environment.agent_python: runs a function (path/to/file.py:function), and "
            f"environment.agent is the command {agent!r}"
        )
    elif shutil.which(program[0]) is None:
        raise UserError(
            f"environment.agent: there is no program {program[0]!r}; a function is given as "
            "path/to/file.py:function"
        )
    if python is not None and shutil.which(python) is None:
        raise UserError(f"environment.agent_python: there is no interpreter {python!r}")


def check_calls(
    config: Config, tokenizer: Any, prompts: Sequence[Prompt], tools: Tools
) -> str | None:
    """Check that calls of these tools are parsed as the chat template writes them, if prompts go
    through it. Returns a note if it has no messages of tools. Raises `UserError`. Environments
    without tools are checked by their worker."""
    from rhymeflow.environments.rendering import ChatRenderer

    if config.environment.agent is not None and not tokenizer.chat_template:
        raise UserError("environment.agent: the model's tokenizer has no chat template")
    schemas = tools.values() if isinstance(tools, dict) else [tools]
    wraps, variables = PromptEncoder(tokenizer, config.data).wraps, config.data.chat_template_kwargs
    # A file's prompts are mostly of one form, so the first ones are enough.
    is_played = config.environment.plays_classes
    if not any(schemas) or not (is_played or any(wraps(each.prompt) for each in prompts[:100])):
        return None
    for each in filter(None, schemas):
        renderer = ChatRenderer(
            tokenizer, each, reads_users=False, variables=variables, appends=not is_played
        )
    if not renderer.answers_as_user:
        return None
    if is_played:
        raise UserError("environment.agent = 'classes': the chat template has no messages of tools")
    return (
        "the chat template has no messages of tools, so what they answer is a message of the user, "
        "in <tool_response> and </tool_response>"
    )


def check_rows(config: Config, prompts: Sequence[Prompt]) -> None:
    """Check that rows name their environments if there are several. Raises `UserError`."""
    names = [each.reward_name for each in config.environment.classes]
    for each in prompts:
        kind_of(names, each.columns, each.where)
