"""The pages: links lead somewhere; commands, configurations and code can be used as they stand."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import shlex
import sys
import tomllib
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rhymeflow import cli
from rhymeflow.cli import dispatch, runs, training
from rhymeflow.config.load import parse_config, read_config
from rhymeflow.reward.functions import Judge
from rhymeflow.utils.user_modules import names_file

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
HISTORY = ROOT / "docs/lab"
"""Its pages keep the commands of their time."""
CURRENT = [page for page in PAGES if page.parent != HISTORY]


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\b.*?\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", text_of(page)):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


# -- commands --------------------------------------------------------------------------------------

COMMAND = re.compile(r"(?:(?:\S*/)?python3? -m |\S*/|\$ )?rhymeflow ([a-z].*)")
STANDS_FOR = {
    r"\b[\w-]+\.yaml\b|\bRECIPE(_OR_FILE)?\b": "demo",
    r"(?<=--)(n|size|temperature|max-tokens|seed|port|learner\.num_ranks) [A-Z]\b": r"\1 1",
    r"(?<=--step )S\b": "1",
    r"(?<=--suite )NAME\b": "held_out",
    r"(train|simulate|sft) \.\.\.": r"\1 demo",
    r" ?\.\.\.": "",
    r"(?<= )\[|(?<=[\w.])\](?= |$)": "",  # of a synopsis; lists are in quotes
}
"""What a page writes in place of a value, and a value."""


def lines_of_code(page: Path) -> Iterator[tuple[str, str]]:
    """Lines of code, and code within a sentence, each with the line after it."""
    text = text_of(page)
    fenced = "".join(blocks(page, "(?:console|bash)"))
    indented = "".join(re.findall(r"^    .*\n", text, re.MULTILINE))
    lines = [line.strip() for line in f"{fenced}\n{indented}".replace("\\\n", " ").splitlines()]
    yield from zip(lines, [*lines[1:], ""], strict=True)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from ((" ".join(code.split()), "") for code in re.findall(r"`([^`]+)`", prose))


def commands(page: Path) -> Iterator[tuple[list[str], str]]:
    """The commands of a page, and the line that is shown below."""
    for line, below in lines_of_code(page):
        found = COMMAND.fullmatch(line)
        if found is None:
            continue
        command = re.split(r" (?:[>|;]|&&) ", found[1])[0]
        for pattern, value in STANDS_FOR.items():
            command = re.sub(pattern, value, command)
        yield shlex.split(command.replace(" PATH", f" {sys.executable}"), comments=True), below


def read(args: Namespace) -> None:
    """In place of what a command does: read its configuration."""
    if args.called in ("train", "simulate"):
        read_config(args.recipe, args.overrides)
    elif args.takes_fields:
        parse_config("", args.overrides)


@pytest.fixture
def only_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, names in (
        (training, "train resume simulate calibrate sft evaluate generate render"),
        (runs, "inspect dashboard runs plot export"),
        (dispatch, "recipes doctor"),
    ):
        for name in names.split():
            monkeypatch.setattr(module, name, read)


@pytest.mark.usefixtures("only_read")
@pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.name)
def test_commands_can_be_typed_as_they_stand(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {each.name.partition(".")[0] for each in ROOT.glob("benchmarks/*.py")}
    for command, below in commands(page):
        if command[0] == "bench" and (command[1:2] or ["NAME"]) != ["NAME"]:
            assert command[1] in names, command
            module = importlib.import_module(f"benchmarks.{command[1]}")
            monkeypatch.setattr(module, "run", lambda args: None)
        elif len(command) == 1 or command[0] == "bench":
            continue  # a command's name, and not the command
        try:
            code = cli.main(command)
        except SystemExit as help_is_shown:
            code = int(help_is_shown.code or 0)
        said = capsys.readouterr().err
        is_named_only = command[1].startswith("-") and "arguments are required" in said
        assert code == 0 or said == f"{below}\n" or is_named_only, (command, said)


def test_other_commands_name_what_there_is() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for page in CURRENT:
        for line, _ in lines_of_code(page):
            if made := re.match(r"make ([a-z-]+)", line):
                assert made[1] in targets, (page.name, line)
            for file in re.findall(r"python3? ((?:scripts|examples|benchmarks)/\S+)", line):
                assert (ROOT / file).is_file(), (page.name, line)
            for extra in re.findall(r"\.\[(\w+)\]", line):
                assert extra in project["optional-dependencies"], (page.name, line)


# -- configurations and code -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "page", [page for page in CURRENT if blocks(page, "yaml")], ids=lambda page: page.name
)
def test_configurations_are_read(page: Path) -> None:
    for text in blocks(page, "yaml"):
        config = parse_config(text, where=page.name)
        functions = [*config.reward.functions]
        for suite in config.eval.suites:
            functions += suite.functions or ()
        for function in functions:
            if not names_file(function.function):
                Judge(function)  # or it would say what is wrong with its name or options
        for name in re.findall(r"\brhymeflow(?:\.\w+)+", text):
            module, _, last = name.rpartition(".")
            assert hasattr(importlib.import_module(module), last), (page.name, name)


def test_code_compiles_and_imports_what_there_is() -> None:
    for page in CURRENT:
        for text in blocks(page, "python"):
            tree = ast.parse(text, page.name)
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("rhymeflow"):
                    exec(ast.unparse(node), {})


def defined(name: str) -> dict[str, Any]:
    """What the code of a page defines."""
    names: dict[str, Any] = {}
    for text in blocks(ROOT / "docs" / name, "python"):
        with suppress(ModuleNotFoundError):  # a library that is not installed
            exec(text, names)
    return names


def test_code_does_what_its_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    rank: Callable[..., list[float]] = defined("configuration.md")["rank"]
    assert rank([], ["bbb", "a", "cc"], [], None, answer=[]) == [0, 1, 0.5]
    correct: Callable[..., list[float]] = defined("own-task.md")["correct"]
    assert correct(["is 4 ", [{"content": "5"}]], ["4", "6"], other=[]) == [1, 0]
    names = defined("environments.md")
    assert names["add"](2, 3) == 5
    coins = names["Coins"]()
    coins.reset(coins=3, prompt="")
    assert (coins.spend(3), coins.get_reward()) == ("0 are left", 1.0)
    echo = names["Echo"]()
    echo.reset(prompt="")
    assert [echo.step([{"content": "a"}]), echo.step([{"content": "b"}])] == ["a", None]
    defined("cost-model.md")
    few, many = map(int, re.findall(r"(\d+)(?: tokens/s)? with", capsys.readouterr().out))
    assert 0 < few < many
    page = ROOT / "docs/simulator.md"
    simulates, gains = blocks(page, "python")
    small = simulates.replace(
        '"4"', '"4", "learner.groups_per_batch": "4"'
    )  # else it takes seconds
    assert small != simulates
    exec(small, {})
    rate, idle, stale = capsys.readouterr().out.split(maxsplit=2)
    assert float(rate) > 0 < float(idle) < 1
    assert sum(ast.literal_eval(stale).values()) == 4 * 4 * 16
    exec(gains, {})
    found = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    shown = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \|", text_of(page), re.MULTILINE)
    assert [(n, f"{float(d):g}", f"{float(gain):.2f}") for n, d, gain in found] == shown


def test_the_index_has_every_page() -> None:
    index = ROOT / "docs/index.md"
    pages = {page.name for page in CURRENT if page.parent == index.parent} - {index.name}
    assert set(re.findall(r"\]\((\w[\w-]*\.md)\)", text_of(index))) == pages


def test_the_lab_log_names_every_entry() -> None:
    index = (ROOT / "docs" / "lab-log.md").read_text()
    for page in (ROOT / "docs" / "lab").glob("*.md"):
        for title in re.findall(r"^## \S+ · (.+)$", page.read_text(), re.MULTILINE):
            assert f"[{title}](lab/{page.name}#" in index, page


def test_the_site_takes_what_pages_link_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without mkdocs: pictures as they are, all else as a page."""

    class File(SimpleNamespace):
        @classmethod
        def generated(cls, config: object, uri: str, **more: object) -> File:
            return cls(src_uri=uri, **more)

    mkdocs = SimpleNamespace(File=File, InclusionLevel=SimpleNamespace(NOT_IN_NAV=None))
    monkeypatch.setitem(sys.modules, "mkdocs.structure.files", mkdocs)
    site = runpy.run_path(str(ROOT / "scripts/site.py"))
    monkeypatch.setitem(site["on_files"].__globals__, "reference", dict)
    docs = ROOT / "docs"
    pages = [File(src_uri=str(each.relative_to(docs))) for each in docs.glob("**/*.md")]
    made = {each.src_uri: vars(each) for each in site["on_files"](pages, None)}
    pictures = [uri for uri in made if uri.endswith(".png")]
    assert pictures
    for uri in pictures:
        assert Path(made[uri]["abs_src_path"]) == ROOT / uri.removeprefix("repository/")
    assert made["repository/examples/trainer.py.md"]["content"].startswith("# examples/trainer.py")


def test_the_readme_is_short() -> None:
    assert len(text_of(ROOT / "README.md").split()) <= 900
