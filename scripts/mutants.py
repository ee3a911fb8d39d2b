"""Breaks a room's code in one place at a time and counts the breakages that its tests notice.

The sample is drawn from statements that read the same at an earlier commit. What today's tests miss
is tried with that commit's tests too: what they noticed is lost.

    python scripts/mutants.py protocol --base 9ba29b4 --count 40
"""

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path

# Files to break, and the tests of the room.
ROOMS = {
    "protocol": (["core/protocol"], ["core", "fake_run"]),
    "packing": (["learner/packing.py"], ["learner/test_packing.py", "learner/test_single.py"]),
    "losses": (
        ["learner/algorithms"],
        [
            "learner/test_losses.py",
            "learner/test_advantages.py",
            "learner/test_trl.py",
            "learner/test_oracle.py",
            "learner/test_algorithms.py",
        ],
    ),
    "noise": (
        ["engine/native/noise.py"],
        ["engine/test_noise.py", "engine/test_engine.py", "engine/test_distribution.py"],
    ),
    "store": (["store/transaction.py"], ["store", "fake_run"]),
    "in_flight": (["runtime/in_flight.py"], ["runtime/test_in_flight.py", "fake_run"]),
}
# What tests were called at commits before they moved.
BEFORE = {"fake_run": "benchmarks/test_chaos_fake.py"}
SWAPPED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True)
class Statement:
    """A statement, or the condition of one with a body, by where it stands and what it says."""

    function: str
    text: str
    occurrence: int


@dataclass(frozen=True)
class Mutant:
    """What stands in a statement, and what a broken copy has there."""

    statement: Statement
    index: int
    was: str
    now: str


def statements(source: str) -> Iterator[tuple[Statement, ast.AST]]:
    """All statements of a file's functions."""
    seen: Counter[tuple[str, str]] = Counter()
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.If | ast.While):
                node = node.test
            elif not isinstance(node, ast.stmt) or hasattr(node, "body"):
                continue
            key = function.name, ast.unparse(node)
            yield Statement(*key, seen[key]), node
            seen[key] += 1


def turned(node: ast.AST) -> ast.AST | None:
    """The node with its operator or constant changed; None where it has neither."""
    new = deepcopy(node)
    if isinstance(new, ast.Compare) and type(new.ops[0]) in SWAPPED:
        new.ops[0] = SWAPPED[type(new.ops[0])]()
    elif isinstance(new, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(new.op) in SWAPPED:
        new.op = SWAPPED[type(new.op)]()
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not):
        new = new.operand
    elif isinstance(new, ast.Constant) and isinstance(new.value, bool):
        new = ast.Constant(not new.value)
    elif isinstance(new, ast.Constant) and isinstance(new.value, int):
        new = ast.Constant(new.value + 1)
    elif isinstance(new, ast.Expr) and isinstance(new.value, ast.Call):
        new = ast.Pass()
    else:
        return None
    return new


def mutants_of(statement: Statement, node: ast.AST) -> list[tuple[Mutant, ast.AST]]:
    """Each way to break a statement, with the node that changes."""
    # Annotations do nothing, and Python 3.11 does not say where the parts of an f-string are.
    skipped = {
        id(inner)
        for outer in ast.walk(node)
        for part in (getattr(outer, "annotation", None), isinstance(outer, ast.JoinedStr) and outer)
        if part
        for inner in ast.walk(part)
    }
    places: list[tuple[Mutant, ast.AST]] = []
    for inner in ast.walk(node):
        new = None if id(inner) in skipped else turned(inner)
        if new is not None:
            was, now = ast.unparse(inner), ast.unparse(new)
            places.append((Mutant(statement, len(places), was, now), inner))
    return places


def files(tree: Path, room: str) -> list[Path]:
    """The files of a room that are broken."""
    under = [tree / "rhymeflow" / name for name in ROOMS[room][0]]
    return [file for path in under for file in ([path], sorted(path.rglob("*.py")))[path.is_dir()]]


def drawn(tree: Path, base: Path, room: str, count: int) -> list[Mutant]:
    """A sample of the mutants of statements that both trees have, the same at each call."""
    then = {key for file in files(base, room) for key, _ in statements(file.read_text())}
    everything = [
        mutant
        for file in files(tree, room)
        for statement, node in statements(file.read_text())
        if statement in then
        for mutant, _ in mutants_of(statement, node)
    ]
    return random.Random(room).sample(everything, min(count, len(everything)))


def broken(tree: Path, room: str, mutant: Mutant) -> tuple[Path, str]:
    """The file that a mutant stands in, and its text with the mutant."""
    for file in files(tree, room):
        source = file.read_text()
        node = dict(statements(source)).get(mutant.statement)
        if node is None:
            continue
        place = mutants_of(mutant.statement, node)[mutant.index][1]
        lines = source.encode().splitlines(keepends=True)
        starts, ends = place.lineno - 1, place.end_lineno - 1
        before = b"".join(lines[:starts]) + lines[starts][: place.col_offset]
        after = lines[ends][place.end_col_offset :] + b"".join(lines[ends + 1 :])
        # In brackets, for the new operator may bind less than the one that stood there.
        new = mutant.now if isinstance(place, ast.stmt) else f"({mutant.now})"
        return file, (before + new.encode() + after).decode()
    raise LookupError(f"no statement {mutant.statement} in {tree}")


def passes(tree: Path, room: str, seconds: float) -> bool:
    """Whether a room's tests pass, within the time they are given."""
    found = [name if (tree / "tests" / name).exists() else BEFORE[name] for name in ROOMS[room][1]]
    tests = [f"tests/{name}" for name in found]
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-m", "not ray"]
    process = subprocess.Popen(
        [*command, "--no-loadscope-reorder", *tests],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(timeout=seconds) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        subprocess.run(["pkill", "-9", "-s", str(process.pid)], check=False)


def noticed(tree: Path, room: str, mutant: Mutant, seconds: float) -> bool:
    """Whether a room's tests fail with the mutant."""
    file, text = broken(tree, room, mutant)
    as_it_was = file.read_text()
    try:
        file.write_text(text)
        return not passes(tree, room, seconds)
    finally:
        file.write_text(as_it_was)


def try_room(room: str, tree: Path, base: Path, count: int) -> dict[str, object]:
    """What today's tests of a room miss, and what of it the earlier ones noticed."""
    patience = {}
    for at in (tree, base):
        start = time.monotonic()
        if not passes(at, room, 3600):
            raise SystemExit(f"{room}: tests fail in {at} with nothing broken")
        patience[at] = 60 + 4 * (time.monotonic() - start)
    sample, missed, lost = drawn(tree, base, room, count), [], 0
    for mutant in sample:
        if not noticed(tree, room, mutant, patience[tree]):
            then = noticed(base, room, mutant, patience[base])
            print(f"{room}: missed {mutant}; before: {'noticed' if then else 'missed'}", flush=True)
            missed.append(asdict(mutant) | {"noticed_before": then})
            lost += then
    noticed_now = len(sample) - len(missed)
    print(f"{room}: {noticed_now} of {len(sample)} noticed, {lost} lost", flush=True)
    return {"sample": len(sample), "noticed": noticed_now, "lost": lost, "missed": missed}


def main() -> None:
    """Tries each room that is named, in checkouts of its own."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("rooms", nargs="*", help=f"of {', '.join(ROOMS)} (default: all)")
    parser.add_argument("--base", required=True, help="the earlier commit")
    parser.add_argument("--count", type=int, default=40, help="mutants of a room")
    parser.add_argument("--out", type=Path, help="a file for the answers, in JSON")
    given = parser.parse_args()
    if unknown := [room for room in given.rooms if room not in ROOMS]:
        parser.error(f"no room {unknown[0]!r}: there are {', '.join(ROOMS)}")
    commit = ["git", "rev-parse", "--verify", "--quiet", f"{given.base}^{{commit}}"]
    if subprocess.run(commit, stdout=subprocess.DEVNULL, check=False).returncode:
        parser.error(f"--base {given.base}: no such commit")
    answers = {}
    with tempfile.TemporaryDirectory() as folder:
        trees = {Path(folder, "now"): "HEAD", Path(folder, "base"): given.base}
        try:
            for tree, commit in trees.items():
                add = ["git", "worktree", "add", "-q", "--detach", str(tree), commit]
                subprocess.run(add, check=True)
            for room in given.rooms or ROOMS:
                answers[room] = try_room(room, *trees, given.count)
                if given.out:
                    given.out.write_text(json.dumps(answers, indent=1))
        finally:
            for tree in trees:
                subprocess.run(["git", "worktree", "remove", "--force", str(tree)], check=False)


if __name__ == "__main__":
    main()
