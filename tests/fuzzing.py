"""Bad input made from a seed, and what is wrong with how it was received.

Right is one clear line (`UserError`, `NotAReward`), or to take all of it as it was given."""

import contextlib
import copy
import io
import json
import math
import random
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rhymeflow import cli
from rhymeflow.config import DataConfig, RewardFunction
from rhymeflow.config.load import parse_config, read_config
from rhymeflow.data.encode import messages_of
from rhymeflow.data.load import load_prompts
from rhymeflow.data.text import TemplateError, rendered
from rhymeflow.errors import UserError
from rhymeflow.reward.functions import Judge, NotAReward
from tests.observe.runs import made
from tests.reward import judged

SECONDS = 20.0  # what takes longer counts as hanging
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 2**31, -(2**63), 2**70, 0.5, -0.0, 1e-9, 1e300),
    *(
        "",
        " ",
        "x",
        "auto",
        "null",
        "5",
        "1e-6",
        "on",
        "\n",
        "\u202e",
        "é" * 3,
        "a\0b",
        "{}",
        "[1]",
    ),
    *([], [None], [[]], {}, {"x": 1}, {"": None}, [1, "2"], ["a", "a"], "long " * 500),
)


def problem(receive: Callable[[random.Random, Path], str | None], seed: int, folder: Path) -> str:
    """Return what is wrong with how a case was received, or ""."""
    draw, started = random.Random(seed), time.monotonic()
    try:
        found = receive(draw, folder) or ""
    except (UserError, NotAReward, TemplateError) as error:
        found = f"more than a line: {error}" if "\n" in str(error) else ""
    except Exception as error:  # noqa: BLE001 - a traceback is what is looked for
        found = f"traceback: {type(error).__name__}: {error}"
    seconds = time.monotonic() - started
    return found or (f"{seconds:.0f} s" if seconds > SECONDS else "")


# -- configurations --------------------------------------------------------------------------------


def configuration(draw: random.Random, folder: Path) -> str | None:
    """Recipes of which some values are replaced: all that is taken stands in the result."""
    base = json.loads(read_config(draw.choice(["demo", "guess", "emulated"])).model_dump_json())
    given = {}
    for _ in range(draw.randint(1, 2)):
        section = draw.choice(list(base))
        value = odd(draw)
        if isinstance(base[section], dict) and base[section] and draw.random() < 0.9:
            name = draw.choice(list(base[section]))
            name = name + "x" if draw.random() < 0.05 else name
            base[section][name] = given[section, name] = value
        else:
            base[section] = value
            given = {key: each for key, each in given.items() if key[0] != section}
            given[section,] = value
    found = json.loads(parse_config(json.dumps(base)).model_dump_json())
    for path, value in given.items():
        held = found
        for name in path:
            held = held[name]
        if not is_as_given(value, held):
            return f"{'.'.join(path)}: {value!r} was taken as {held!r}"
    return None


def is_as_given(given: Any, held: Any) -> bool:
    """Whether a field holds what was given: one value may stand for a list, text for a number."""
    if given is None and isinstance(held, dict):
        return True  # a section without lines has its defaults
    if given is None or isinstance(given, bool) != isinstance(held, bool):
        return given is held or held == []
    if isinstance(given, dict) and isinstance(held, dict):
        return all(is_as_given(value, held.get(name)) for name, value in given.items())
    if isinstance(held, list):
        whole = given if isinstance(given, list) else [given]
        return len(whole) == len(held) and all(map(is_as_given, whole, held))
    if isinstance(held, dict):  # a name in place of a section
        return given in held.values() or any(is_as_given(given, each) for each in held.values())
    with contextlib.suppress(TypeError, ValueError):
        if float(given) == float(held):
            return True
    return str(given) == str(held)


def odd(draw: random.Random) -> Any:
    return copy.deepcopy(draw.choice(ODD))


# -- rows and messages -----------------------------------------------------------------------------


def rows(draw: random.Random, folder: Path) -> str | None:
    """A file of rows: each that is taken has its prompt and its columns."""
    given = [
        {"prompt": odd(draw) if draw.random() < 0.3 else "1 + 1 =", **columns(draw)}
        for _ in range(draw.randint(1, 4))
    ]
    text = "".join(json.dumps(row, ensure_ascii=draw.random() < 0.5) + "\n" for row in given)
    if draw.random() < 0.2:
        text = text[: draw.randrange(len(text))]
    path = folder / "rows.jsonl"
    path.write_text(text, encoding="utf-8")
    taken, _ = load_prompts(DataConfig(source=str(path), eval_size=0), seed=0)
    lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    if len(taken) != len(lines):
        return f"{len(taken)} of {len(lines)} rows"
    for each, row in zip(taken, lines, strict=True):
        if each.prompt != row.pop("prompt"):
            return f"a prompt became {each.prompt!r}"
        held = {name: each.columns.get(name) for name in row}
        if not all(map(is_as_given, row.values(), held.values())):
            return f"{row} became {held}"
    return None


def columns(draw: random.Random) -> dict[str, Any]:
    names = draw.sample(["answer", "level", "x y", "", "prompts", "é", "completions"], 2)
    return {name: odd(draw) for name in names if draw.random() < 0.7}


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function | tojson }}){% endfor %}{% endfor %}"
)


def messages(draw: random.Random, folder: Path) -> str | None:
    """A conversation as a prompt: what each message of one that is taken says is in its text."""
    said = [message(draw) for _ in range(draw.randint(1, 4))]
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({"prompt": said}) + "\n", encoding="utf-8")
    config = DataConfig(source=str(path), eval_size=0)
    [prompt], _ = load_prompts(config, seed=0)
    text = rendered(Templated(), messages_of(prompt, config))
    for each in said:
        content = each.get("content") if isinstance(each, dict) else each
        if isinstance(content, str) and content not in text:
            return f"{content!r} is not in {text!r}"
    return None


def message(draw: random.Random) -> Any:
    if draw.random() < 0.05:
        return odd(draw)
    made: dict[str, Any] = {
        "role": draw.choice(["user", "assistant", "system", "tool"]),
        "content": draw.choice(["so", "1\n2", "", "né"]),
    }
    if draw.random() < 0.2:
        call = {"name": "add", "arguments": odd(draw)}
        made["tool_calls"] = draw.choice([[{"type": "function", "function": call}], [call]])
    if draw.random() < 0.2:
        made[draw.choice(["role", "content", "tool_calls", "name", "x"])] = odd(draw)
    return made


class Templated:
    """A tokenizer as far as templates are concerned."""

    chat_template = TEMPLATE

    def apply_chat_template(self, said: Any, **options: Any) -> str:
        from jinja2 import Environment

        return Environment().from_string(TEMPLATE).render(messages=said, **options)


# -- rewards ---------------------------------------------------------------------------------------


class Raises:
    """Whatever is asked of it fails."""

    def __float__(self) -> float:
        raise ZeroDivisionError("no number")

    def __len__(self) -> int:
        raise RuntimeError("no length")


RETURNED: list[Any] = []
NUMBERS = (0, 1, -2.5, True, np.float32(0.5), np.int64(3), torch.tensor(0.25), None)
NO_NUMBERS = (
    math.nan,
    math.inf,
    1e400,
    "1",
    "",
    [],
    {},
    object(),
    Raises(),
    1j,
    b"1",
    torch.ones(2),
)


def function(completions: list[str], **named: Any) -> Any:
    """A reward function that returns what the case says."""
    [what] = RETURNED
    if isinstance(what, Exception):
        raise what
    return what


def rewards(draw: random.Random, folder: Path) -> str | None:
    """What a function returns for three responses: a number is one, and nothing else is."""
    pool = NUMBERS if draw.random() < 0.4 else NUMBERS + NO_NUMBERS
    given: Any = [
        draw.choice(pool) for _ in range(3 if draw.random() < 0.8 else draw.randint(0, 5))
    ]
    shape = draw.random()
    if shape < 0.2:
        given = draw.choice([tuple(given), iter(given), dict(enumerate(given)), *given, None])
    elif shape < 0.3:
        given = draw.choice([ValueError("a\nb"), KeyError(), AssertionError(), Exception("")])
    RETURNED[:] = [given]
    found = judged(Judge(RewardFunction(function="tests.fuzzing.function")), ["a", "b", "c"])
    wanted = [None if each is None else float(each) for each in given]
    return None if found == wanted else f"{given!r} was taken as {found}"


# -- damaged run directories -----------------------------------------------------------------------

COMMANDS = (
    ("inspect",), ("inspect", "--json"), ("inspect", "--worst"), ("inspect", "--step", "2"),
    ("inspect", "--trajectory", "1.0"), ("runs",), ("runs", "--json"), ("plot",),
    ("export", "--output", "out.jsonl", "--force"),
)  # fmt: skip


def run_directories(draw: random.Random, folder: Path) -> str | None:
    """A command that looks at a run of which some files are damaged."""
    whole = folder / "whole"
    if not whole.exists():
        made(whole)
        with contextlib.closing(sqlite3.connect(whole / "events.db")) as log:
            log.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    damaged = folder / "damaged"
    shutil.rmtree(damaged, ignore_errors=True)
    shutil.copytree(whole, damaged)
    for _ in range(draw.randint(1, 2)):
        damage(draw, draw.choice(sorted(damaged.iterdir())))
    command, *options = draw.choice(COMMANDS)
    options = [str(folder / each) if each == "out.jsonl" else each for each in options]
    if command == "plot":
        options = ["--output", str(folder / "out.png")]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main([command, str(damaged), *options])
    said = err.getvalue()
    if code not in (0, 1, 2) or (code and said.count("\n") != 1):
        return f"{command}: code {code}: {said}"
    return None


def damage(draw: random.Random, path: Path) -> None:
    content = b"" if path.is_dir() else path.read_bytes()
    place = draw.randrange(len(content)) if content else 0
    match draw.choice(["cut", "flip", "delete", "directory", "garbage", "more"]):
        case "cut":
            changed = content[:place]
        case "flip":
            flipped = bytes(draw.randrange(256) for _ in range(draw.randint(1, 64)))
            changed = content[:place] + flipped + content[place + len(flipped) :]
        case "garbage":
            changed = draw.randbytes(100)
        case "more":
            changed = content + b'{"half'
        case kind:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            if kind == "directory":
                path.mkdir()
            return
    if not path.is_dir():
        path.write_bytes(changed)


KINDS: dict[str, Callable[[random.Random, Path], str | None]] = {
    "configurations": configuration,
    "rows": rows,
    "messages": messages,
    "rewards": rewards,
    "run directories": run_directories,
}
