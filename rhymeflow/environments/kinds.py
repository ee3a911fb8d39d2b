"""Imports the classes and tools that section `environment` names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rhymeflow.config import EnvironmentClass, EnvironmentConfig
from rhymeflow.data.encode import Schema
from rhymeflow.data.generators import task_module
from rhymeflow.environments import MCP, Environment
from rhymeflow.environments.code_execution import CodeExecution
from rhymeflow.environments.mcp_tools import McpTool, mcp_tools
from rhymeflow.environments.tools import schema_of
from rhymeflow.errors import UserError
from rhymeflow.utils.user_modules import function_of, imported
from rhymeflow.utils.user_values import Arguments, described

NOT_TOOLS = frozenset({"reset", "get_reward", "close"})
"""Public methods of environment classes that are not tools."""


@dataclass(frozen=True)
class Kind:
    """A kind of environment. `make` creates an object; None: there are only tools, without state.

    If `methods` is None, it answers with `step`, else with tools: `functions` and these methods.
    """

    name: str
    make: Callable[[], Any] | None
    methods: dict[str, Callable[..., Any]] | None
    functions: dict[str, Callable[..., Any]]

    def schemas(self) -> list[Schema]:
        """Return the schemas of the tools. Raises `UserError` if a tool cannot be described."""
        tools = {**self.functions, **(self.methods or {})}
        return [
            tool.schema
            if isinstance(tool, McpTool)
            else schema_of(tool, f"tool {name} of {self.name}")
            for name, tool in tools.items()
        ]


def load_kinds(config: EnvironmentConfig) -> list[Kind]:
    """Import classes and tools; [] if there are none. Raises `UserError` if one cannot be used."""
    functions: dict[str, Callable[..., Any]] = {}
    for spec in config.tools:
        for name, function in _tools(spec, config.timeout).items():
            if name in functions:
                raise UserError(f"tool {spec}: there is another tool named {name!r}")
            functions[name] = function
    if not config.classes:
        return [Kind("tools", None, {}, functions)] if functions else []
    return [_kind(each, functions) for each in config.classes]


def _tools(spec: str, seconds: float) -> dict[str, Callable[..., Any]]:
    """Return the functions that an entry of `environment.tools` names, by name."""
    if spec.startswith(MCP):
        return {each.name: each for each in mcp_tools(spec, seconds)}
    if spec == "code_execution":
        function: Callable[..., Any] = CodeExecution().code_execution
    else:
        function = imported(spec, f"tool {spec}")
    if not inspect.isroutine(function):
        raise UserError(f"tool {spec}: is a {type(function).__name__}, not a function")
    return {getattr(function, "__name__", ""): function}


def _kind(config: EnvironmentClass, functions: dict[str, Callable[..., Any]]) -> Kind:
    name, where = config.reward_name, f"environment {config.environment}"
    factory = _factory(config.environment, where)
    Arguments(factory).check_options(config.options, where, only=True)
    make: Callable[[], Any] = partial(factory, **config.options)
    cls: Any = factory
    if not inspect.isclass(factory):  # a function that creates an object: create one for its class
        try:
            cls = type(make())
        except Exception as error:  # noqa: BLE001 - user code may raise anything
            raise UserError(f"{where}: raised {described(error)}") from None
    if not callable(getattr(cls, "reset", None)):
        raise UserError(
            f"{where}: it has no method `reset` (docs/from-others.md wraps SkyRL's and NeMo-RL's)"
        )
    if callable(getattr(cls, "step", None)):
        if cls.step is Environment.step:
            raise UserError(f"{where}: it defines no `step`")
        if functions:
            raise UserError(f"{where}: it has a `step`, so environment.tools are never called")
        return Kind(name, make, None, {})
    methods: dict[str, Callable[..., Any]] = {
        each: method
        for each, method in inspect.getmembers(cls, inspect.isfunction)
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
