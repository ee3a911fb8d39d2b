"""Hook of mkdocs: brings in what pages of docs/ link to elsewhere, and pages written from code.

A link to ../examples/x.py, which works in the repository, becomes one to a page with that file.
"""

from __future__ import annotations

import inspect
import os
import re
import types
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from rhymeflow.cli.dispatch import add_all
from rhymeflow.cli.parser import with_commands
from rhymeflow.config import help as fields

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")
"""The file of a link or picture that is no URL."""
MODULES = "rhymeflow", "rhymeflow.trl", "rhymeflow.core.strategies.base"
"""Whose public names the Python reference describes."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".toml": "toml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add files that pages link to outside of docs/, theirs too, and pages of the reference."""
    from mkdocs.structure.files import File, InclusionLevel

    for name, text in reference().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    waiting = [ROOT / "docs" / each.src_uri for each in files if each.src_uri.endswith(".md")]
    waiting = [each for each in waiting if each.exists()]  # not those of the reference
    found: set[Path] = set()
    while waiting:
        page = waiting.pop()
        for target in {*linked(page)} - found:
            if target.is_relative_to(ROOT / "docs"):
                continue
            found.add(target)
            picture = target.suffix == ".png"
            source = {"abs_src_path": str(target)} if picture else {"content": shown(target)}
            new = File.generated(config, uri(target), inclusion=InclusionLevel.NOT_IN_NAV, **source)
            files.append(new)
            if target.suffix == ".md":
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at where their targets are on the site."""
    source = repository_path(page.file.src_uri)
    if source is None:
        return markdown
    here = Path(page.file.src_uri).parent

    def moved(match: re.Match[str]) -> str:
        target = (source.parent / match[1]).resolve()
        return os.path.relpath(uri(target), here) if target.exists() else match[1]

    return LINK.sub(moved, markdown)


# -- files outside of docs/ ------------------------------------------------------------------------


def uri(path: Path) -> str:
    """Return the place of a file on the site, where text that is no page becomes one."""
    if path.is_relative_to(ROOT / "docs"):
        return path.relative_to(ROOT / "docs").as_posix()
    name = f"repository/{path.relative_to(ROOT).as_posix()}"
    return name if path.suffix in (".md", ".png") else f"{name}.md"


def repository_path(uri: str) -> Path | None:
    """Return the file of a page; None if it has none, as it was made."""
    path = ROOT / "docs" / uri
    if uri.startswith("repository/"):
        path = ROOT / uri.removeprefix("repository/")
    return path if path.exists() else None


def linked(page: Path) -> Iterator[Path]:
    """Yield the files of the repository that a page links to."""
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        target = (page.parent / link).resolve()
        if target.exists() and target.is_relative_to(ROOT):
            yield target


def shown(path: Path) -> str:
    """Return a page that shows a file, or the names in a directory."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        return f"# {name}/\n\n" + "".join(f"- {each.name}\n" for each in sorted(path.iterdir()))
    text = path.read_text(encoding="utf-8")
    return (
        text
        if path.suffix == ".md"
        else f"# {name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n````\n"
    )


# -- reference -------------------------------------------------------------------------------------


def reference() -> dict[str, str]:
    """Return the pages of the reference, by name."""
    return {"configuration": configuration(), "commands": commands(), "python": python()}


def configuration() -> str:
    """Every field with its default and meaning."""
    parts = [
        "# Configuration, field by field",
        "Every field is an option of the command line (`--learner.beta 0.01`), an entry of a "
        "YAML file, and a name in `Trainer`'s `config`. `rhymeflow train --help=all` prints the "
        "same. `None` is `null` in YAML and on the command line.",
    ]
    for name, heading, entries in fields.sections():
        summary = " ".join(" ".join(heading).split()).partition(": ")[2]
        parts.append(f"## {name}\n\n{summary}" if name else "## Outside of sections")
        parts += [
            f"### `{path}`\n\nDefault: `{fields.shown_default(field)}`\n\n{fields.full_text(field)}"
            for path, field in entries
        ]
    return "\n\n".join(parts) + "\n"


def commands() -> str:
    """The usage of every command."""
    os.environ["COLUMNS"] = str(fields.WIDTH)
    made, add = with_commands()
    add_all(add, [])
    parts = ["# Commands", made.description or ""]
    for name, each in made.commands.items():
        parts.append(f"## rhymeflow {name}\n\n```text\n{each.format_help().rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def python() -> str:
    """Public names, with signatures and docstrings."""
    parts = ["# Python"]
    for name in MODULES:
        module = import_module(name)
        parts.append(f"## {name}\n\n{plain(module)}")
        for public in getattr(module, "__all__", None) or own(module):
            if not public.startswith("_"):
                parts.append(described(f"{name}.{public}", getattr(module, public)))
    return "\n\n".join(parts) + "\n"


def own(module: types.ModuleType) -> list[str]:
    """Return the names of classes and functions that a module defines."""
    members = inspect.getmembers(module, lambda each: inspect.isclass(each) or callable(each))
    return [name for name, each in members if getattr(each, "__module__", "") == module.__name__]


def described(name: str, value: Any) -> str:
    """Return a heading, the signature and the docstring, of a class also those of its methods."""
    short = name.rpartition(".")[2]
    if not callable(value):
        return f"### {short}"
    parts = [f"### {short}\n\n{signature(short, value)}{plain(value)}"]
    if inspect.isclass(value) and not issubclass(value, BaseModel):
        for method, each in vars(value).items():
            if inspect.isfunction(each) and not method.startswith("_") and inspect.getdoc(each):
                parts.append(f"#### {short}.{method}\n\n{signature(method, each)}{plain(each)}")
    return "\n\n".join(parts)


def signature(name: str, value: Any) -> str:
    """Return a block of code with a signature, one parameter a line if it is long. A section of the
    configuration has none, as its fields have a page, and an exception neither."""
    if inspect.isclass(value) and issubclass(value, BaseModel | Exception):
        return ""
    found = inspect.signature(value)
    line = f"{name}{found}".replace("'", "")
    if len(line) > fields.WIDTH:
        each = "".join(f"    {parameter},\n" for parameter in found.parameters.values())
        line = f"{name}(\n{each})".replace("'", "")
    return f"```python\n{line}\n```\n\n"


def plain(value: Any) -> str:
    """Return a docstring, for a page: arguments and errors as lists."""
    lines, is_list = [], False
    for line in (inspect.getdoc(value) or "").splitlines():
        if line in ("Args:", "Raises:", "Returns:"):
            lines += [f"**{line.removesuffix(':')}**", ""]
            is_list = line != "Returns:"
            continue
        is_list = is_list and (not line or line.startswith("    "))
        if is_list and re.match(r"    \S", line):
            name, _, text = line.strip().partition(": ")
            line = f"- `{name}`: {text}"
        lines.append(line.removeprefix("    ") if is_list else line)
    return "\n".join(lines)
