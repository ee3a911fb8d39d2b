"""Sections `environment` and `reward`: what answers the policy, and what scores it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from rhymeflow.config.section import NonNegative, Positive, PositiveFloat, Section


class EnvironmentClass(Section):
    """One kind of environment."""

    by_name = "environment"

    environment: str
    """`path/to/file.py:Class`, a dotted name, or `recipe:NAME`."""
    name: str | None = None
    """In metrics, and of its reward. `None`: the class's name. Where there are several, a row of
    the data is answered by the one that its column `environment` names."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class."""
    weight: float = 1.0
    """Factor of its reward in the weighted sum with those of `reward.functions`."""

    share: PositiveFloat | None = None
    """Of the prompts that are drawn, so many are of this class, relative to the shares of the
    others, which all have one then. `None`: as many as the data has."""

    @property
    def reward_name(self) -> str:
        """Names it, and its reward."""
        spec = self.environment
        return self.name or spec.rpartition(":" if ":" in spec else ".")[2]


class EnvironmentConfig(Section):
    """What answers the policy between its turns: tools, games, other programs. Without `classes`
    and `tools` a response is one turn."""

    classes: tuple[EnvironmentClass, ...] = ()
    """Classes of which each response gets an object, with the methods of
    `rhymeflow.environments.Environment`, or with `reset` and public methods that are tools, as in
    TRL."""
    tools: tuple[str, ...] = ()
    """Functions, by name as in `classes`, that the policy may call. They are told to it by the chat
    template."""
    on_tool_error: Literal["observe", "fail"] = "observe"
    """After an exception inside a tool: the policy reads it as the tool's answer, or the response
    fails. What else raises, hangs or dies is always a failure."""
    max_turns: Positive = 10
    """Turns of the policy; a response that would have more ends there, with reason `max_turns`, and
    does not count as truncated."""
    max_observation_chars: Positive = 10_000
    """Characters of an answer; of a longer one so many are kept, and the policy is told."""
    num_workers: Positive = 1
    """Processes that environments run in. Many that wait share one, those that compute do not."""
    timeout: PositiveFloat = 60.0
    """Seconds that `reset`, an answer, or a reward may take."""
    retries: NonNegative = 1
    """Further tries after an environment raised, hung or died: a new one is brought to the same
    turn by what was answered before, which must come out the same."""
    on_failure: Literal["stop", "drop"] = "stop"
    """After the last try: stop the run and show the error, or drop the group, counted under
    `endings/aborted`, or the held-out answer, counted under `eval/SUITE/failed`. A failure never
    becomes a reward."""

    max_consecutive_failures: Positive = 10
    """Environments in a row that may fail where `on_failure` is `drop`; then the run stops, since
    nothing would be left to train on."""

    @property
    def is_used(self) -> bool:
        """Whether responses have turns."""
        return bool(self.classes or self.tools)


_AT_ONCE = ("llm_judge", "reward_model")
"""Built-ins that judge the responses of a group all at once."""


class RewardFunction(Section):
    """One reward function and its weight in the sum."""

    by_name = "function"

    function: str
    """`path/to/file.py:function`, a dotted name, or a built-in: `exact_match`, `math_verify`,
    `regex`, `reasoning_gym`, `llm_judge`, `reward_model`, `recipe:NAME`."""
    weight: float = 1.0
    """Factor in the weighted sum."""
    options: dict[str, Any] = {}
    """Keyword arguments bound before the call, such as `{pattern: ...}` for `regex`."""
    per: Literal["group", "response"] = "group"
    """`group`: called once for each group, with exactly the responses that are trained on, so it
    can compare them. `response`: called as each response ends, with this one alone. Built-ins are
    called per response if this is not given."""

    @model_validator(mode="before")
    @classmethod
    def _built_ins_judge_alone(cls, given: Any) -> Any:
        """A built-in compares nothing, so it need not wait for the rest of the group."""
        name = given.get("function") if isinstance(given, dict) else None
        is_built_in = isinstance(name, str) and (name.startswith("recipe:") or "." not in name)
        if is_built_in and name not in _AT_ONCE:
            return {"per": "response"} | given
        return given


class RewardConfig(Section):
    """How a trajectory is scored."""

    by_name = "functions"

    functions: tuple[RewardFunction, ...] = (RewardFunction(function="exact_match"),)
    """The weighted sum of these is the reward, together with those of `environment.classes`."""
    num_workers: Positive = 1
    """Processes that run the functions, started by the reward worker."""
    timeout: PositiveFloat = 60.0
    """Seconds one call may take, of a group or of a response, before its process is killed and the
    call counts as failed."""
    retries: NonNegative = 1
    """Further tries after a call that raised, hung, or returned something that is no reward."""
    on_failure: Literal["stop", "drop"] = "stop"
    """After the last try: stop the run and show the error, or drop the group, counted under
    `endings/aborted`, or the held-out answer, counted under `eval/SUITE/failed`. A failure never
    becomes a reward."""
    max_consecutive_failures: Positive = 10
    """Calls in a row that may fail where `on_failure` is `drop`; then the run stops, since nothing
    would be left to train on. A call and its retries are one."""
