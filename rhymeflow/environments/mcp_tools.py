"""Tools of an MCP server, `environment.tools: [mcp:COMMAND]` or `[mcp:URL]`.

The policy is told the schemas that the server lists. A call that the server refuses, or whose tool
fails, is an answer. A server that dies, or does not speak MCP, is a failure, and the next call
starts or connects to it again.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import sys
from functools import cache
from typing import Any

from rhymeflow.data.encode import Schema
from rhymeflow.environments import MCP
from rhymeflow.errors import UserError
from rhymeflow.utils.extras import extra

_URLS = ("http://", "https://")
_INVALID_PARAMS = -32602  # JSON-RPC: the server refuses the arguments


class McpServerFailed(Exception):  # noqa: N818 - it is what happened
    """The server died, or did not speak MCP, which is not the policy's fault."""


class McpToolFailed(Exception):  # noqa: N818 - it is what happened
    """A call failed; the policy reads what the server says."""


class McpTool:
    """A tool, called with the arguments of its schema."""

    def __init__(self, server: _Server, schema: Schema) -> None:
        self._server, self.schema = server, schema
        self.name: str = schema["function"]["name"]

    async def __call__(self, /, **arguments: Any) -> str:
        """Return what the tool answers. Raises `McpServerFailed` or `McpToolFailed`."""
        return await self._server.call(self.name, arguments)


def check_server(spec: str) -> None:
    """Raise `UserError` unless the server is a URL, or a command of a program that is there."""
    target = spec.removeprefix(MCP)
    try:
        program, *_ = [target] if target.startswith(_URLS) else shlex.split(target)
    except ValueError:  # nothing, or a quotation without an end
        raise UserError(f"tool {spec}: give mcp:COMMAND, or mcp:URL of a server") from None
    if not target.startswith(_URLS) and shutil.which(program) is None:
        raise UserError(f"tool {spec}: there is no program {program!r}; a URL begins with http")


def mcp_tools(spec: str, seconds: float) -> list[McpTool]:
    """Return the tools that a server lists within `seconds`; it is asked once in each process.
    Raises `UserError` if it does not list any."""
    server = _Server(spec)
    return [McpTool(server, schema) for schema in _listed(spec, seconds)]


@cache
def _listed(spec: str, seconds: float) -> tuple[Schema, ...]:
    check_server(spec)
    extra("mcp", f"tool {spec}", "mcp")
    try:
        tools = asyncio.run(_list(spec, seconds))
    except TimeoutError:
        raise UserError(
            f"tool {spec}: the server has not listed its tools for environment.timeout = "
            f"{seconds:g} seconds"
        ) from None
    except Exception as error:  # noqa: BLE001 - any server, and whatever carries its messages
        raise UserError(f"tool {spec}: the server lists no tools: {_reason(error)}") from None
    if not tools:
        raise UserError(f"tool {spec}: the server has no tools")
    return tuple(map(_schema, tools))


async def _list(spec: str, seconds: float) -> list[Any]:
    tools: list[Any] = []
    async with asyncio.timeout(seconds), _connection(spec) as client:
        cursor = None
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            if (cursor := page.next_cursor) is None:
                return tools


def _connection(spec: str) -> Any:
    """Return a client of `mcp`, to be entered and left by one task."""
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    target = spec.removeprefix(MCP)
    if target.startswith(_URLS):
        return Client(target)
    command, *arguments = shlex.split(target)
    # Its default environment lacks what servers of a user need, such as keys.
    server = StdioServerParameters(command=command, args=arguments, env=dict(os.environ))
    return Client(stdio_client(server, errlog=sys.stderr))


def _schema(tool: Any) -> Schema:
    parameters = {"type": "object", "properties": {}, **tool.input_schema}
    about = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": about}


class _Server:
    """Calls a server over one connection, which is opened by the first call of a process."""

    def __init__(self, spec: str) -> None:
        self._spec = spec
        self._opened: asyncio.Future[Any] | None = None
        """Its client."""
        self._holders: dict[asyncio.Future[Any], asyncio.Task[None]] = {}
        """The task that has entered each client."""

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        if self._opened is None:
            self._opened = asyncio.get_running_loop().create_future()
            self._holders[self._opened] = asyncio.create_task(self._hold(self._opened))
        opened = self._opened
        try:
            client = await asyncio.shield(opened)
            result = await client.call_tool(name, arguments)
        except Exception as error:  # noqa: BLE001 - as in `_listed`
            if getattr(error, "code", None) == _INVALID_PARAMS:
                raise McpToolFailed(_reason(error)) from None
            if self._opened is opened:
                self._opened = None
                self._holders[opened].cancel()
            raise McpServerFailed(f"{self._spec}: {_reason(error)}") from None
        return _text(name, result)

    async def _hold(self, opened: asyncio.Future[Any]) -> None:
        try:
            async with _connection(self._spec) as client:
                opened.set_result(client)
                await asyncio.get_running_loop().create_future()  # until it is cancelled
        except Exception as error:  # noqa: BLE001 - as in `_listed`
            if not opened.done():
                opened.set_exception(error)
        finally:
            del self._holders[opened]
            if self._opened is opened:
                self._opened = None


def _text(name: str, result: Any) -> str:
    """Return the text of an answer. Raises `McpToolFailed` if it has something else."""
    parts = []
    for block in result.content:
        text = getattr(getattr(block, "resource", block), "text", None)
        if text is None:
            raise McpToolFailed(f"{name} answered with {block.type!r}, which is no text")
        parts.append(text)
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content))
    text = "\n".join(parts)
    if result.is_error:
        raise McpToolFailed(text or f"{name} failed")
    return text


def _reason(error: BaseException) -> str:
    """Return what went wrong in one line: the innermost of a group's errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(getattr(error, "message", "") or error).split())
    return text or type(error).__name__
