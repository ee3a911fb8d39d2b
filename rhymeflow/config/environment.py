"""Sections `environment` and `reward`: environments, tools, and reward functions."""

from __future__ import annotations

import os
import shutil
from typing import Any, Literal

from pydantic import model_validator

from rhymeflow.config.section import NonNegative, Positive, PositiveFloat, Section


class EnvironmentClass(Section):
    """One kind of environment."""

    by_name = "environment"

    environment: str
    """`path/to/file.py:Class`, a dotted name, or `recipe:NAME`."""
    name: str | None = None
    """Name of the environment in metrics, and of its reward. `None`: the class's name. With several
    classes, column `environment` of the data names the one for each row."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class."""
    weight: float = 1.0
    """Factor of its reward in the weighted sum with those of `reward.functions`."""
    share: PositiveFloat | None = None
    """How often prompts of this class are drawn, relative to the other classes' shares. If one
    class sets it, all must. `None`: in proportion to its rows in the data."""

    @property
    def reward_name(self) -> str:
        """`name`, or else the name of the class."""
        spec = self.environment
        return self.name or spec.rpartition(":" if ":" in spec else ".")[2]


class EnvironmentConfig(Section):
    """Tools, games and other programs that answer the policy between its turns. Without `classes`
    and `tools`, a response is one turn."""

    classes: tuple[EnvironmentClass, ...] = ()
    """Environment classes; each response gets its own object. A class has the methods of
    `rhymeflow.environments.Environment`, or `reset` and public methods that are tools, as in
    TRL."""
    tools: tuple[str, ...] = ()
    """Functions that the policy may call, named as in `classes`, `code_execution`, or `mcp:COMMAND`
    or `mcp:URL`, the tools of an MCP server. The chat template describes them to the policy."""
    agent: str | tuple[str, ...] | None = None
    """A program that calls the policy by HTTP, in place of classes and tools: a function
    (`path/to/file.py:function`) or a command, as text or as a list, or `verifiers`, which plays the
    tasks of `data.source: verifiers:NAME`, or `classes`, which plays `classes` and `tools`: for
    chat templates that change earlier turns. Each response is a run of it; what it returns is its
    reward, under the name `agent`, or that of the class. `max_turns` limits its calls."""
    agent_python: str | None = None
    """Interpreter that runs the function of `agent`, which needs no Rhymeflow; `None`: that of the
    run. Of `verifiers` it is also the one that makes the tasks (`data.options`: `python`)."""
    agent_timeout: PositiveFloat = 3600.0
    """Longest time in seconds of an agent's program, the policy's answers included."""
    idle_timeout: PositiveFloat = 60.0
    """Longest time in seconds in which an agent's program makes no call while none is being
    answered."""
    on_tool_error: Literal["observe", "fail"] = "observe"
    """What an exception inside a tool does. `observe`: the policy reads it as the observation.
    `fail`: the response fails, as it always does when something else raises, hangs or dies."""
    max_turns: Positive = 10
    """Most turns of the policy in a response. One that would have more ends with reason
    `max_turns`, and does not count as truncated."""
    max_observation_chars: Positive = 10_000
    """Longest observation (an environment's or tool's answer) in characters; a longer one is cut,
    with a note to the policy."""
    num_workers: Positive = 1
    """Processes that run environments. One process is enough for many environments that mostly
    wait, for example for a server."""
    timeout: PositiveFloat = 60.0
    """Longest time in seconds for `reset`, an observation, or a reward."""
    retries: NonNegative = 1
    """Further tries after an environment raised, hung or died. A new one replays the earlier turns,
    and must give the same observations."""
    on_failure: Literal["stop", "drop"] = "stop"
    """What happens after the last failed try. `stop`: the run stops with the error. `drop`: the
    group is dropped and counted under `endings/aborted`, or the held-out response under
    `eval/SUITE/failed`. A failure never becomes a reward."""
    max_consecutive_failures: Positive = 10
    """With `on_failure: drop`, number of environments failing in a row at which the run stops."""

    @property
    def is_used(self) -> bool:
        """Whether something answers the policy, so that a response can have several turns."""
        return bool(self.classes or self.tools or self.agent)

    @property
    def judges(self) -> tuple[EnvironmentClass, ...]:
        """What rewards responses beside reward functions: the classes, or the agent."""
        is_one = self.agent and not self.plays_classes
        return (EnvironmentClass(environment="agent"),) if is_one else self.classes

    @property
    def plays_classes(self) -> bool:
        """Whether `classes` and `tools` are played as an agent's program."""
        return self.agent == "classes"


def interpreter(python: str) -> str:
    """Return the path of an interpreter, for processes that may run elsewhere."""
    return os.path.abspath(shutil.which(python) or python)


_PER_GROUP = ("llm_judge", "reward_model")
"""Built-ins that score all responses of a group in one call."""


class RewardFunction(Section):
    """A reward function and its weight."""

    by_name = "function"

    function: str
    """`path/to/file.py:function`, a dotted name, or a built-in: `exact_match`, `math_verify`,
    `regex`, `code_execution`, `reasoning_gym`, `llm_judge`, `reward_model`, `recipe:NAME`."""
    weight: float = 1.0
    """Factor in the weighted sum."""
    options: dict[str, Any] = {}
    """Keyword arguments bound before the call, such as `{pattern: ...}` for `regex`."""
    per: Literal["group", "response"] = "group"
    """`group`: one call for each group, with exactly the responses that are trained on, so that the
    function can compare them. `response`: a call for each response, as soon as it ends. The default
    of built-ins, except `llm_judge` and `reward_model`, is `response`."""

    @model_validator(mode="before")
    @classmethod
    def _built_ins_are_per_response(cls, values: Any) -> Any:
        """Default to `per: response` for built-ins that do not compare responses."""
        name = values.get("function") if isinstance(values, dict) else None
        is_built_in = isinstance(name, str) and (name.startswith("recipe:") or "." not in name)
        if is_built_in and name not in _PER_GROUP:
            return {"per": "response"} | values
        return values


class RewardConfig(Section):
    """Reward functions, and how they are called."""

    by_name = "functions"

    functions: tuple[RewardFunction, ...] = (RewardFunction(function="exact_match"),)
    """Functions whose weighted sum, with that of `environment.classes`, is the reward."""
    num_workers: Positive = 1
    """Processes that run the functions, started by the reward worker."""
    timeout: PositiveFloat = 60.0
    """Longest time of a call in seconds; then its process is killed, and the call has failed."""
    retries: NonNegative = 1
    """Further tries after a call that raised, hung, or did not return rewards."""
    on_failure: Literal["stop", "drop"] = "stop"
    """What happens after the last failed try. `stop`: the run stops with the error. `drop`: the
    group is dropped and counted under `endings/aborted`, or the held-out response under
    `eval/SUITE/failed`. A failure never becomes a reward."""
    max_consecutive_failures: Positive = 10
    """With `on_failure: drop`, number of calls failing in a row at which the run stops."""
