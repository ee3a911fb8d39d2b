"""The view of what a run is made of: its data and code as text, checkpoints, and what its workers
printed. Paths come from the run directory and its configuration, never from a request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import rhymeflow
from rhymeflow.dashboard.run import Run
from rhymeflow.errors import UserError, nearest
from rhymeflow.observe import query
from rhymeflow.store.checkpoint_dirs import paths_of

MOST = 64 * 1024
"""Bytes of a file that are sent: the first ones of a source, the last ones of an output."""
PACKAGE = Path(rhymeflow.__file__).parent
_TEXT = {".py", ".json", ".jsonl", ".csv", ".tsv", ".txt", ".md", ".yaml", ".yml"}
_FIRST = "SELECT group_id, member FROM segments WHERE group_id >= 0 ORDER BY 1, 2 LIMIT 1"
_PROBLEM = re.compile(
    r"^(?:[\w.]+(?:Error|Exception|Interrupt|Died)\b.*|.*\b(?:ERROR|CRITICAL)\b.*)$", re.MULTILINE
)
"""The last line of a traceback, or a line of that level."""


def about(run: Run) -> dict[str, Any]:
    """Return `query.changed`, `sources` (see `source`), paths of `checkpoints` by version, and the
    `first` response, (group, member), None before there is one."""
    with run.reader() as reader:
        attempts = reader.attempts()
        first = reader.query(_FIRST)
    named = _named(json.loads(attempts[-1].config) if attempts else {})
    checkpoints = paths_of(run.directory)
    return {
        "changed": query.changed(query.fields_of(run.directory)),
        "sources": [source(run.directory, *each) for each in dict.fromkeys(named)],
        "checkpoints": {str(step): str(path) for step, path in checkpoints.items()},
        "first": first[0] if first else None,
    }


def _named(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Fields that name data or code, with what they name."""
    for section, field, key in (
        ("data", "source", None), ("data", "eval_source", None), ("eval", "suites", "source"),
        ("reward", "functions", "function"), ("environment", "classes", "environment"),
        ("environment", "tools", None),
    ):  # fmt: skip
        found = config.get(section, {}).get(field) or []
        entries: list[Any] = [found] if isinstance(found, str) else found
        for each in entries:
            if named := each[key] if key else each:
                yield f"{section}.{field}", named


def source(run_dir: Path, field: str, spec: str) -> dict[str, Any]:
    """Return the `path` of what a field names, its size in `bytes`, the first `MOST` of them as
    `text`, and the `line`, from 1, that defines it; each None where it is not known."""
    named, name = _place(field, spec)
    # A path is as it was given, from where the run was started.
    places = (each / named for each in [Path.cwd(), *run_dir.parents] if named is not None)
    path = next((each for each in places if each.exists()), None)
    text = line = size = None
    if path is not None and path.is_file():
        size = path.stat().st_size
        if path.suffix in _TEXT:
            with path.open("rb") as file:
                text = file.read(MOST).decode(errors="replace")
        pattern = rf"^[ \t]*(?:async )?(?:def|class) {re.escape(name)}\b"
        if name and (found := re.search(pattern, text or "", re.MULTILINE)):
            line = found.string.count("\n", 0, found.start()) + 1
    known = {"path": path and str(path), "bytes": size, "text": text, "line": line}
    return {"field": field, "spec": spec, **known}


def _place(field: str, spec: str) -> tuple[Path | None, str]:
    """Return the path of what a field names, if it names one, and the name in that file."""
    path, _, name = spec.rpartition(":")
    if path in ("recipe", "warm_start"):
        module = "task" if path == "recipe" else path
        return PACKAGE / "recipes" / Path(name).name / f"{module}.py", ""
    if path.endswith(".py"):
        return Path(path).expanduser(), name
    if field.startswith(("data.", "eval.")):
        return (None if path == "reasoning_gym" else Path(spec).expanduser()), ""
    if "." in spec:  # a module, which would have to be imported
        return None, ""
    return PACKAGE / "reward" / ("llm_judge.py" if spec == "llm_judge" else "builtin.py"), spec


# -- what workers printed --------------------------------------------------------------------------


def outputs(run: Run) -> list[dict[str, Any]]:
    """Return each worker's output, of the newest attempt first: `name`, `bytes`, and the last line
    that tells of a `problem`."""
    found = []
    for name, path in _files(run).items():
        problem = (_PROBLEM.findall(_tail(path)) or [None])[-1]
        found.append({"name": name, "bytes": path.stat().st_size, "problem": problem})
    return found


def output(run: Run, name: str) -> dict[str, Any]:
    """Return the end of a worker's output. Raises `UserError` if there is none of this name."""
    files = _files(run)
    if name not in files:
        raise UserError(f"there is no output {name!r}{nearest(name, files)}")
    return {"bytes": files[name].stat().st_size, "text": _tail(files[name])}


def _files(run: Run) -> dict[str, Path]:
    paths = run.directory.glob("logs/attempt-[0-9]*/*.log")
    ordered = sorted(paths, key=lambda path: (-int(path.parent.name[8:]), path.name))
    return {f"{path.parent.name}/{path.stem}": path for path in ordered}


def _tail(path: Path) -> str:
    """The last `MOST` bytes, from the beginning of a line."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - MOST, 0))
        text = file.read(MOST).decode(errors="replace")
    return text.partition("\n")[2] if size > MOST else text
