"""What docs/environments.md shows: every form, and classes for other libraries, if installed."""

import asyncio
import re
import shlex
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from rhymeflow.config import EnvironmentConfig
from rhymeflow.config.load import parse_config, split_overrides
from rhymeflow.environments.kinds import load_kinds
from rhymeflow.environments.live import LiveEnvironment
from rhymeflow.environments.messages import Opening, Said

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"


def test_a_form_is_the_same_in_yaml_and_on_the_command_line():
    row = re.compile(r"^\| .* \| `(.*)` \| `(--.*)` \|$", re.MULTILINE)
    forms = row.findall(PAGE.read_text(encoding="utf-8"))
    assert len(forms) == 9
    for text, options in forms:
        overrides = split_overrides(shlex.split(options))[1]
        assert parse_config(text) == parse_config("", overrides) != parse_config(""), options


def played(library: str, name: str, folder: Path, turns: list[str], **options: Any) -> list[Any]:
    """What the page's class of this name answers, and the reward."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    [block] = [each for each in blocks if f"class {name}:" in each and library in each]
    file = folder / "world.py"
    file.write_text(block)
    classes = [{"environment": f"{file}:{name}", "options": options}]
    config = EnvironmentConfig.model_validate({"classes": classes})
    [kind] = load_kinds(config)

    async def play() -> list[Any]:
        live = LiveEnvironment(0, config, kind, [])
        read = [(await live.open(Opening(0, 3, "Go.", {"row": 1}))).text]
        read += [(await live.step(Said(each, []))).answer for each in turns]
        read.append((await live.judge()).value)
        await live.close()
        return read

    return asyncio.run(play())


def test_gymnasium(tmp_path):
    pytest.importorskip("gymnasium")
    way = ["I go down", "Down!", "hm", "right", "right", "down", "right"]
    first, *boards, last, reward = played("gymnasium", "FrozenLake", tmp_path, way)
    assert "[S]FFF\nFHFH\nFFFH\nHFFG" in first
    assert "SFFF\n[F]HFH" in boards[0]
    assert boards[2] == "Say left, down, right or up."
    assert (last, reward) == (None, 1.0)


def test_openenv(tmp_path):
    pytest.importorskip("openenv")
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Say(Action):
        text: str

    class Heard(Observation):
        text: str

    class Countdown(Environment):
        def reset(self, seed=None, episode_id=None, **kwargs):
            self.left = seed
            return Heard(text=f"{seed} are left")

        def step(self, action, timeout_s=None, **kwargs):
            self.left -= int(action.text)
            return Heard(text=f"{self.left} are left", reward=0.5, done=self.left == 0)

        @property
        def state(self):
            return State()

    place = socket.create_server(("127.0.0.1", 0))
    app = create_fastapi_app(Countdown, Say, Heard)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [place]})
    thread.start()
    try:
        url = f"http://127.0.0.1:{place.getsockname()[1]}"
        read = played("openenv", "Remote", tmp_path, ["2", "1"], url=url)
    finally:
        server.should_exit = server.force_exit = True
        thread.join()
    assert read == ["3 are left", "1 are left", None, 1.0]
