"""What all benchmarks share: interleaved repetition, options, the machine, the report.

Sides are measured in turn (A B, B A, A B ...), so that a machine whose speed drifts affects them
alike; every record carries the command and the machine that made it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import signal
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rhymeflow.errors import UserError

Line = TypeVar("Line", bound=msgspec.Struct)

RESULTS = Path(__file__).parent / "results"
"""Where `--record` writes `NAME.json` and `NAME.md`."""

_PACKAGES = ("torch", "transformers", "trl", "vllm", "rhymeflow")


@dataclass(frozen=True)
class Target:
    """A figure that should be at least `target`, or at most `target` with `at_most`."""

    name: str
    value: float
    target: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        return self.value <= self.target if self.at_most else self.value >= self.target

    def text(self) -> str:
        sign = "<=" if self.at_most else ">="
        verdict = "met" if self.met else "NOT met"
        return f"{self.name}: {self.value:.4g} (target {sign} {self.target:g}: {verdict})"


def at_most(name: str, value: float, limit: float) -> Target:
    """A figure that should be at most `limit`."""
    return Target(name, value, limit, at_most=True)


Found = tuple[list[dict[str, Any]], list[Target]]
"""Rows and targets of a part."""


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of every benchmark; `rhymeflow bench` calls it before the module's own."""
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    what = "write benchmarks/results/NAME.json and .md"
    parser.add_argument("--record", action="store_true", help=what)


def add_number(
    parser: argparse._ActionsContainer, option: str, value: int | None, what: str
) -> None:
    """Add an option for a whole number from 1 on; `what` it is, for the help."""
    default = "" if value is None else f" (default {value})"
    parser.add_argument(option, type=whole(1), default=value, help=what + default, metavar="N")


def add_choice(parser: argparse._ActionsContainer, option: str, choices: Iterable[str]) -> None:
    """Add an option that may be given several times; None: all."""
    what = "may be repeated (default: all)"
    parser.add_argument(option, choices=list(choices), action="append", help=what)


def ended_with_their_pool() -> None:
    """Let a process of a pool that is interrupted clean up: it is ended once, by SIGTERM of its
    parent, which alone hears Ctrl-C, and goes by an exception."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


def whole(least: int) -> Callable[[str], int]:
    """An option's type: whole numbers from `least` on."""

    def parsed(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            what = f"given {text}, should be a whole number from {least} on"
            raise argparse.ArgumentTypeError(what)
        return int(text)

    return parsed


def add_parts_argument(parser: argparse.ArgumentParser, parts: Iterable[str]) -> None:
    """Add `--parts`, which `report_parts` reads; the default is all of them."""
    what = f"comma-separated, of {', '.join(parts)} (default: all)"
    parser.add_argument("--parts", default=",".join(parts), help=what)


def interpreter(path: str) -> str:
    """The python of another environment, as an absolute path.

    Raises:
        UserError: there is none.
    """
    if not (os.path.isfile(path) and os.access(path, os.X_OK)):
        raise UserError(f"{path}: there is no such program")
    return os.path.abspath(path)


def machine() -> dict[str, Any]:
    """Describe the machine: processor, usable cores, memory, GPU, versions. Imports no torch."""
    description: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": _gpu_names(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            description[package] = metadata.version(package)
    return description


def interleave(
    sides: Mapping[str, Callable[[], float]], repeats: int, what: str = ""
) -> dict[str, list[float]]:
    """Measure each side `repeats` times, in turn, in reverse order every other time.

    Values of one index are a pair: they were measured one right after the other. A line for each
    goes to stderr; `what` is measured, for the line.
    """
    values: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(repeats):
        order = list(sides) if repeat % 2 == 0 else list(sides)[::-1]
        for side in order:
            values[side].append(sides[side]())
            line = f"{what}  {repeat + 1}/{repeats} {side}: {values[side][-1]:.4g}"
            print(line, file=sys.stderr, flush=True)
    return values


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the pairwise ratios ours / theirs."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def percentile(values: Sequence[float], share: float) -> float:
    """The least of the values that so great a share of them does not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def spread(name: str, values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Return the columns of some values: their median, called `name`, `least` and `greatest`."""
    found = {name: statistics.median(values), "least": min(values), "greatest": max(values)}
    return {column: round(value, digits) for column, value in found.items()}


def side_row(side: str, values: Sequence[float], unit: str) -> dict[str, Any]:
    """Return a table row: median and spread of one side's values."""
    return {"side": side, **spread("median", values), "runs": len(values), "unit": unit}


def report_parts(
    name: str,
    parts: Mapping[str, Callable[[argparse.Namespace], Found]],
    args: argparse.Namespace,
    notes: str,
) -> dict[str, Any]:
    """Measure the parts that were asked for and report them, as `NAME-PART-...` if not all were."""
    chosen = args.parts.split(",")
    if unknown := set(chosen) - set(parts):
        raise UserError(f"--parts: no part {min(unknown)!r}; there are {', '.join(parts)}")
    rows: list[dict[str, Any]] = []
    targets: list[Target] = []
    for part in chosen:
        print(f"{part}:", file=sys.stderr, flush=True)
        found = parts[part](args)
        rows += found[0]
        targets += found[1]
    name = name if chosen == list(parts) else "-".join([name, *chosen])
    return report(name, rows, targets, args, notes)


def report(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    targets: Sequence[Target],
    args: argparse.Namespace,
    notes: str = "",
    command: str | None = None,
) -> dict[str, Any]:
    """Print the table, record it with `--record`, print the JSON line with `--json`; return it.

    `rows` may have different columns; `notes` says how the figures were measured, `command` what
    measured them, if another than this one.
    """
    result = {
        "name": name,
        "rows": [dict(row) for row in rows],
        "targets": [{**asdict(t), "met": t.met, "text": t.text()} for t in targets],
        "notes": notes,
        "command": command or _command(),
        "machine": machine(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
    print(table(rows))
    for target in targets:
        print(target.text())
    if notes:
        print(notes)
    if args.record:
        record(result)
    if args.json:
        print(json.dumps(result))
    return result


def record(result: Mapping[str, Any]) -> None:
    """Write `NAME.json` and a readable `NAME.md` into `RESULTS`, replacing what stands there."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{result['name']}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    lines = [f"# {result['name']}", "", f"Measured {result['date']} by", ""]
    lines += [f"    {result['command']}", "", result["notes"], "", table(result["rows"]), ""]
    lines += [f"- {target['text']}" for target in result["targets"]]
    lines += ["", "Machine: " + ", ".join(f"{k} {v}" for k, v in result["machine"].items()), ""]
    path.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")


def lines(path: Path, kind: type[Line]) -> list[Line]:
    """What earlier measurements added to a file, each its line."""
    found = path.read_bytes().splitlines() if path.is_file() else []
    return [msgspec.json.decode(line, type=kind) for line in found]


def add_line(path: Path, value: msgspec.Struct) -> None:
    """Add one to the file."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(value) + b"\n")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as an aligned Markdown table."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [columns] + [[_cell(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    cells.insert(1, ["-" * width for width in widths])
    padded = [[c.ljust(width) for c, width in zip(line, widths, strict=True)] for line in cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _command() -> str:
    """The command as a reader can repeat it, without the path it was started by."""
    name = Path(sys.argv[0]).name
    return " ".join(["rhymeflow" if name == "__main__.py" else name, *sys.argv[1:]])


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _gpu_names() -> list[str]:
    found = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    lines = [line for path in found for line in path.read_text(encoding="utf-8").splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
