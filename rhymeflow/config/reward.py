"""Section `reward`: how trajectories are scored."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from rhymeflow.config.section import NonNegative, Positive, PositiveFloat, Section

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
    start_timeout: PositiveFloat = 120.0
    """Seconds a process may take to import the functions."""
    retries: NonNegative = 1
    """Further tries after a call that raised, hung, or returned something that is no reward."""
    on_failure: Literal["stop", "drop"] = "stop"
    """After the last try: stop the run and show the error, or drop the group, counted under
    `endings/aborted`, or the held-out answer, counted under `eval/SUITE/failed`. A failure never
    becomes a reward."""
    max_consecutive_failures: Positive = 10
    """Calls in a row that may fail where `on_failure` is `drop`; then the run stops, since nothing
    would be left to train on. A call and its retries are one."""
