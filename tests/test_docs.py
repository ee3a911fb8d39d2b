"""The pages: links lead somewhere, commands can be typed as they stand, the README stays short."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rhymeflow import cli
from rhymeflow.cli import training
from rhymeflow.config.load import list_recipes, read_config

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
HISTORY = ROOT / "docs/lab"
"""Its pages keep the commands of their time."""

COMMAND = re.compile(r"(?<!\$ )\brhymeflow (train|simulate|sft|bench) ([^`\n#>]*)")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def commands(page: Path) -> Iterator[list[str]]:
    """The commands of a page that name a recipe or a benchmark, not only a placeholder."""
    for name, rest in COMMAND.findall(page.read_text(encoding="utf-8")):
        arguments = shlex.split(rest.replace(" PATH", f" {sys.executable}"))
        if (
            (name == "bench" and arguments[0] != "NAME")
            or arguments[0] in list_recipes()
            or (name == "train" and arguments[0].startswith("--model"))
        ):
            yield [name, *arguments]


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent != HISTORY], ids=lambda p: p.name)
def test_commands_can_be_typed_as_they_stand(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(args: Any) -> int:
        read_config(args.recipe, args.overrides)
        return 0

    for name in ("train", "simulate", "sft"):
        monkeypatch.setattr(training, name, load)
    for command in commands(page):
        if command[0] == "bench":
            module = importlib.import_module(f"benchmarks.{command[1]}")
            monkeypatch.setattr(module, "run", lambda args: None)
        assert cli.main(command) == 0, command


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900
