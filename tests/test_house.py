"""The house stays small enough for one reader: lines per room, files, names, module docstrings."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "rhymeflow"

ROOMS = {
    "calibration.py": 441, "cli": 1_310, "cluster.py": 283, "config": 2_877, "core": 3_748,
    "cpu": 1_034, "dashboard": 1_671, "data": 1_644, "doctor.py": 191, "emulation.py": 255,
    "engine": 4_385,
    "environments": 4_482, "evaluation": 354, "export": 707, "histospec": 2_026, "learner": 4_415,
    "memory.py": 461, "models": 2_831, "observe": 3_422, "placement.py": 144, "pool.py": 542,
    "profiles": 122, "recipes": 539, "reward": 1_031, "runtime": 5_528, "sandbox": 404,
    "sft": 487, "sim": 3_277,
    "store": 2_594, "suites": 345, "trainer": 1_067, "trl": 1_315, "utils": 1_604, "weights": 1_937,
    "workers": 2_415,
}  # fmt: skip
"""Lines that a room of the package may have. A new capability names what it adds, and what went."""

ELSEWHERE = 570  # lines of all other files at the first level together

TOTALS = {"rhymeflow": 60_456, "tests": 47_829, "benchmarks": 8_757}

THEORY = {
    "core/histopipe/layout.py", "core/protocol/group.py", "core/protocol/ordered.py",
    "core/protocol/staleness.py", "core/strategies/routing.py", "cpu/__init__.py",
    "engine/native/noise.py", "engine/native/scheduler.py", "engine/native/verify.py",
    "engine/vllm/weights.py", "histospec/kernels.py", "learner/algorithms/advantages.py",
    "learner/algorithms/losses.py", "learner/packing.py", "learner/token_details.py",
    "observe/limits.py", "weights/changes.py", "weights/proof.py", "weights/shared_memory.py",
}  # fmt: skip
"""Files whose docstring is a page: a proof, a derivation, or a format in memory."""


def parsed() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


def lines_of(files: list[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


def python_files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_keeps_its_budget(room):
    assert lines_of(python_files(PACKAGE / room)) <= ROOMS[room]


def test_the_whole_keeps_its_budget():
    others = [path for path in PACKAGE.iterdir() if path.name not in ROOMS]
    assert lines_of([file for path in others for file in python_files(path)]) <= ELSEWHERE
    for name, limit in TOTALS.items():
        assert lines_of(python_files(ROOT / name)) <= limit, name
    assert len(python_files(PACKAGE)) <= 369


def test_a_name_is_that_of_one_class():
    """But for the environments of recipes, which are a user's code."""
    found = defaultdict(list)
    for path, module in parsed():
        if not path.startswith("recipes/"):
            for node in ast.walk(module):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(path)
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_what_a_file_is_for_is_said_in_six_lines():
    """Examples and layouts, which are indented, are not counted."""
    long = {}
    for path, module in parsed():
        text = ast.get_docstring(module) or ""
        prose = [line for line in text.splitlines() if line and not line.startswith(" ")]
        if path not in THEORY and len(prose) > 6:
            long[path] = len(prose)
    assert long == {}
