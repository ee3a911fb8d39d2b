"""Tools of MCP servers: one by hand over pipes, and one of the package `mcp` over HTTP."""

import asyncio
import json
import socket
import sys
import threading
from typing import Any

import pytest

from rhymeflow.config import Config, EnvironmentConfig
from rhymeflow.environments import check_names, mcp_tools
from rhymeflow.environments.kinds import load_kinds
from rhymeflow.environments.live import CallFailed, LiveEnvironment
from rhymeflow.environments.messages import Call, Said
from tests.environments.mcp_server import ADD, FILE
from tests.environments.worlds import FILE as WORLDS
from tests.refused import refusal

pytest.importorskip("mcp")
SERVER = f"mcp:{sys.executable} {FILE}"


def section(*tools: str, **fields: Any) -> EnvironmentConfig:
    return EnvironmentConfig.model_validate({"tools": tools or [SERVER], **fields})


def live(config: EnvironmentConfig) -> LiveEnvironment:
    [kind] = load_kinds(config)
    return LiveEnvironment(0, config, kind, kind.schemas())


async def asked(environment: LiveEnvironment, name: str, **arguments: Any) -> str:
    """What the policy reads after a call."""
    said = Said("", [Call(name, json.dumps(arguments))])
    [message] = (await environment.step(said)).answer
    return message["content"]


def test_the_policy_is_told_what_the_server_lists_on_all_its_pages():
    [kind] = load_kinds(section(SERVER, f"{WORLDS}:multiply"))
    add, does, multiply = kind.schemas()
    assert add["function"] == {
        "name": "add", "description": "Add two numbers.", "parameters": ADD["inputSchema"],
    }  # fmt: skip
    assert does["function"]["description"] == ""
    assert multiply["function"]["name"] == "multiply"


def test_answers_and_failures_are_read_by_the_policy_and_one_server_serves_all():
    one, other = live(section()), live(section())

    async def play() -> None:
        assert await asked(one, "add", a=2, b=40) == "42"
        pid, _ = (await asked(one, "does", what="pid")).split("\n")
        assert pid in await asked(one, "does", what="pid")
        assert "needs the argument 'b'" in await asked(one, "add", a=2)
        failed = "Error: McpToolFailed: "
        assert await asked(one, "does", what="fail") == f"{failed}no such file"
        assert await asked(one, "does", what="refuse") == f"{failed}not like this"
        picture = f"{failed}does answered with 'image', which is no text"
        assert await asked(one, "does", what="picture") == picture
        assert await asked(one, "does", what="structure") == '{"n": 3}'
        assert await asked(one, "does", what="nothing") == ""
        many = await asyncio.gather(*(asked(each, "add", a=1, b=2) for each in (one, other)))
        assert many == ["3", "3"]

    asyncio.run(play())


@pytest.mark.parametrize(
    ("what", "why"),
    [("die", "Connection closed"), ("break", "not like this"), ("nonsense", "validation error")],
)
def test_a_server_that_fails_is_an_error_and_the_next_call_has_another(what, why):
    """Neither an answer that is empty nor one for the policy."""

    environment = live(section())

    async def play() -> None:
        before = await asked(environment, "does", what="pid")
        with pytest.raises(CallFailed, match=f"tool does raised McpServerFailed: {SERVER}.*{why}"):
            await asked(environment, "does", what=what)
        assert await asked(environment, "does", what="pid") != before

    asyncio.run(play())


def test_a_server_has_the_variables_of_the_run(monkeypatch):
    monkeypatch.setenv("A_KEY", "open sesame")
    assert asyncio.run(asked(live(section()), "does", what="key")) == "open sesame"


def test_a_call_that_is_given_up_while_the_server_starts_is_nothing_to_others():
    async def play() -> None:
        add, _ = mcp_tools.mcp_tools(SERVER, 60.0)
        first, second = (asyncio.create_task(add(a=1, b=2)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == "3"

    mcp_tools.mcp_tools(SERVER, 60.0)  # which runs a loop of its own
    asyncio.run(play())


def test_it_can_fail_the_response():
    environment = live(section(on_tool_error="fail"))
    with pytest.raises(CallFailed, match="tool does raised McpToolFailed: no such file"):
        asyncio.run(asked(environment, "does", what="fail"))


@pytest.mark.parametrize(
    ("tools", "seconds", "says"),
    [
        ([f"{SERVER} ends"], 60, "the server lists no tools: Connection closed"),
        ([f"{SERVER} none"], 60, "the server has no tools"),
        ([f"{SERVER} silent"], 0.3, "not listed its tools for environment.timeout = 0.3 seconds"),
        ([SERVER, f"{WORLDS}:add"], 60, "there is another tool named 'add'"),
        (["mcp:http://127.0.0.1:9/mcp"], 60, "the server lists no tools: "),
    ],
)
def test_a_server_without_tools_is_refused(tools, seconds, says):
    assert says in refusal(load_kinds, section(*tools, timeout=seconds))


def test_a_command_is_looked_for_before_the_run():
    def check(spec: str) -> None:
        check_names(Config.model_validate({"environment": {"tools": [spec]}}))

    check(SERVER)
    check("mcp:https://example.org/mcp")
    assert "tool mcp:npxx -y x: there is no program 'npxx'" in refusal(check, "mcp:npxx -y x")
    assert "give mcp:COMMAND, or mcp:URL" in refusal(check, "mcp:")


def test_a_server_at_a_url_of_the_package_itself():
    import uvicorn
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("sums", log_level="ERROR")

    @server.tool()
    def total(numbers: list[float]) -> str:
        """Add numbers."""
        return f"{sum(numbers):g}"

    place = socket.create_server(("127.0.0.1", 0))
    settings = uvicorn.Config(server.streamable_http_app(), log_level="critical")
    web = uvicorn.Server(settings)
    thread = threading.Thread(target=web.run, kwargs={"sockets": [place]})
    thread.start()
    spec = f"mcp:http://127.0.0.1:{place.getsockname()[1]}/mcp"

    async def play(environment: LiveEnvironment) -> None:
        assert await asked(environment, "total", numbers=[1.5, 2]) == "3.5"
        assert "should be" in await asked(environment, "total", numbers=["x"])
        web.should_exit = web.force_exit = True
        await asyncio.to_thread(thread.join)
        with pytest.raises(CallFailed, match="tool total raised McpServerFailed: mcp:http"):
            await asked(environment, "total", numbers=[1])

    try:
        asyncio.run(play(live(section(spec))))
    finally:
        web.should_exit = web.force_exit = True
        thread.join()


@pytest.fixture(autouse=True)
def _asked_anew():
    yield
    mcp_tools._listed.cache_clear()
