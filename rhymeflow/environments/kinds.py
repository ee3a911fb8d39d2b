"""From the names in section `environment` to what is made, and what it can do."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rhymeflow.config import EnvironmentClass, EnvironmentConfig
from rhymeflow.data.encode import Schema
from rhymeflow.data.generators import task_module
from rhymeflow.environments import Environment
from rhymeflow.environments.tools import schema_of
from rhymeflow.errors import UserError
from rhymeflow.utils.user_modules import function_of, imported
from rhymeflow.utils.user_values import Arguments, described

NOT_TOOLS = frozenset({"reset", "get_reward", "close"})
"""Public methods of TRL's classes that the policy cannot call."""


@dataclass(frozen=True)
class Kind:
    """One kind of environment. `make` makes an object of it; None: it has tools and no state.

    With `methods` None it answers by `step`, else by tools: the `functions` and these methods.
    """

    name: str
    make: Callable[[], Any] | None
    methods: dict[str, Callable[..., Any]] | None
    functions: dict[str, Callable[..., Any]]

    def schemas(self) -> list[Schema]:
        """What the policy is told of its tools; `UserError` if that cannot be said of one."""
        tools = {**self.functions, **(self.methods or {})}
        return [schema_of(tool, f"tool {name} of {self.name}") for name, tool in tools.items()]


def load_kinds(config: EnvironmentConfig) -> list[Kind]:
    """Import what the configuration names; empty if there are no environments."""
    functions: dict[str, Callable[..., Any]] = {}
    for spec in config.tools:
        function = imported(spec, f"tool {spec}")
        name = getattr(function, "__name__", "")
        if not inspect.isroutine(function):
            raise UserError(f"tool {spec}: is a {type(function).__name__}, not a function")
        if name in functions:
            raise UserError(f"tool {spec}: there is another tool named {name!r}")
        functions[name] = function
    if not config.classes:
        return [Kind("tools", None, {}, functions)] if functions else []
    return [_kind(each, functions) for each in config.classes]


def _kind(config: EnvironmentClass, functions: dict[str, Callable[..., Any]]) -> Kind:
    name, where = config.reward_name, f"environment {config.environment}"
    factory = _factory(config.environment, where)
    Arguments(factory).check_options(config.options, where, only=True)
    make: Callable[[], Any] = partial(factory, **config.options)
    made: Any = factory
    if not inspect.isclass(factory):  # it makes an object, which is looked at and not used
        try:
            made = type(make())
        except Exception as error:  # noqa: BLE001 - user code may raise anything
            raise UserError(f"{where}: raised {described(error)}") from None
    if not callable(getattr(made, "reset", None)):
        raise UserError(f"{where}: it has no method `reset`")
    if callable(getattr(made, "step", None)):
        if made.step is Environment.step:
            raise UserError(f"{where}: it defines no `step`")
        if functions:
            raise UserError(f"{where}: it has a `step`, so environment.tools are never called")
        return Kind(name, make, None, {})
    methods: dict[str, Callable[..., Any]] = {
        each: method
        for each, method in inspect.getmembers(made, inspect.isfunction)
        if not each.startswith("_") and each not in NOT_TOOLS
    }
    for each in methods:
        if each in functions:
            raise UserError(
                f"{where}: its method {each!r} has the name of one of environment.tools"
            )
    if not methods and not functions:
        raise UserError(f"{where}: it has neither `step` nor public methods that are tools")
    return Kind(name, make, methods, functions)


def _factory(spec: str, where: str) -> Callable[..., Any]:
    kind, _, recipe = spec.partition(":")
    if kind == "recipe":
        return function_of(task_module(recipe, where), "Environment", where)
    return imported(spec, where)
