"""A server of MCP over standard input and output, by hand: it starts at once, and misbehaves."""

import json
import os
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__)
ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "inputSchema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
DOES = {"name": "does", "inputSchema": {"type": "object", "properties": {"what": {}}}}
NUMBER = {"type": "number"}
MULTIPLY = {
    "name": "multiply",
    "description": "Multiply two numbers.",
    "inputSchema": {
        "type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"],
    },
}  # fmt: skip
PICTURE = {"type": "image", "data": "", "mimeType": "image/png"}


def text(*parts: str, **more: Any) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": each} for each in parts], **more}


def called(name: str, arguments: dict[str, Any]) -> Any:
    """A result, or the code of an error."""
    if name == "add":
        return text(str(arguments["a"] + arguments["b"]))
    if name == "multiply":
        return text(str(arguments["a"] * arguments["b"]))
    match arguments["what"]:
        case "pid":
            return text(str(os.getpid()), "twice")
        case "key":
            return text(os.environ["A_KEY"])
        case "fail":
            return text("no such file", isError=True)
        case "refuse":
            return -32602
        case "break":
            return -32603
        case "picture":
            return {"content": [PICTURE]}
        case "structure":
            return {"content": [], "structuredContent": {"n": 3}}
        case "nothing":
            return {"content": []}
        case "nonsense":
            return {"content": 7}
    os._exit(3)


def answer(method: str, given: dict[str, Any], mode: str) -> Any:
    match method:
        case "initialize":
            version = given["protocolVersion"]
            about = {"name": "by hand", "version": "1"}
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
        case "tools/list" if mode == "none":
            return {"tools": []}
        case "tools/list" if mode == "multiplies":
            return {"tools": [MULTIPLY]}
        case "tools/list" if "cursor" in given:
            return {"tools": [DOES]}
        case "tools/list":
            return {"tools": [ADD], "nextCursor": "2"}
        case "tools/call":
            return called(given["name"], given.get("arguments", {}))
    return -32601


def main(mode: str) -> None:
    if mode == "ends":
        sys.exit("no key")
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" not in asked or mode == "silent":
            continue
        said = answer(asked["method"], asked.get("params", {}), mode)
        if isinstance(said, int):
            said = {"error": {"code": said, "message": "not like this"}}
        else:
            said = {"result": said}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **said}), flush=True)


if __name__ == "__main__":
    main(*[*sys.argv[1:], ""][:1])
