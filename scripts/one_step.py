"""Which files of the package one training step of the demo enters: `python scripts/one_step.py`.

A short run is traced in all its processes. The files entered between its first and its last
published version are compared with docs/one-step.md, which names each: on the main path, or beside
it with the reason.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rhymeflow"
PAGE = ROOT / "docs" / "one-step.md"

RUN = (
    *("train", "demo", "--learner.max_steps", "4", "--learner.groups_per_batch", "4"),
    *("--data.eval_size", "4", "--rollout.num_generations", "4"),
)

STEP_ENDS = "runtime/reporting.py", "end_step"
"""What the controller calls once for each published version."""

TRACER = """
import os, sys, threading, time

PACKAGE, OUT = os.environ["TRACED_PACKAGE"], os.environ["TRACE_OUT"]
files, seen = {}, set()

def entered(frame, event, argument):
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(PACKAGE) or code.co_name == "<module>":
        return
    pid, tick = os.getpid(), int(time.monotonic() * 100)
    what = pid, tick, code.co_filename, code.co_name
    if what not in seen:
        seen.add(what)
        if pid not in files:  # a child has its parent's
            files[pid] = os.open(f"{OUT}/{pid}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.write(files[pid], f"{tick} {code.co_filename} {code.co_name}\\n".encode())

def follow():
    threading.setprofile(entered)
    sys.setprofile(entered)

if "forkserver" in "".join(sys.orig_argv):
    os.register_at_fork(after_in_child=follow)  # its imports, which take long, are no step's
else:
    follow()
"""


def traced() -> list[str]:
    """The files that whole steps entered, by their paths in the package, sorted."""
    with tempfile.TemporaryDirectory() as name:
        there = Path(name)
        (there / "sitecustomize.py").write_text(TRACER)
        (out := there / "out").mkdir()
        changed = {
            "PYTHONPATH": os.pathsep.join([str(there), str(ROOT)]),
            "TRACED_PACKAGE": f"{PACKAGE}{os.sep}",
            "TRACE_OUT": str(out),
        }
        command = [sys.executable, "-m", "rhymeflow", *RUN, "--run.output_dir", str(there / "run")]
        done = subprocess.run(
            command, env={**os.environ, **changed}, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"the run that is traced failed:\n{done.stderr}")
        entered = [
            (int(tick), str(Path(path).relative_to(PACKAGE)), function)
            for each in out.iterdir()
            for tick, path, function in map(str.split, each.read_text().splitlines())
        ]
    ends = sorted({tick for tick, path, function in entered if (path, function) == STEP_ENDS})
    begin, *_, end = ends  # of several steps: one may begin with all its responses rewarded
    return sorted({path for tick, path, _ in entered if begin < tick <= end})


def named() -> tuple[list[str], list[str]]:
    """The files that the page names: on the main path, in order, and beside it."""
    main_path, beside = PAGE.read_text().split("\n## Beside the main path\n")
    path_files = re.findall(r"^\d+\. `([\w/]+\.py)`", main_path, flags=re.MULTILINE)
    return path_files, re.findall(r"`([\w/]+\.py)`", beside)


def num_lines(path: str) -> int:
    """Of a file of the package."""
    return len((PACKAGE / path).read_text().splitlines())


def main() -> None:
    """Print the files, and fail if the page does not name one."""
    if sys.argv[1:]:
        sys.exit(f"{sys.argv[0]} takes no arguments")
    found, (main_path, beside) = traced(), named()
    for path in found:
        where = "main path" if path in main_path else "beside" if path in beside else "NOT NAMED"
        print(f"{num_lines(path):5}  {path}  {where}")
    print(f"{len(found)} files, {sum(map(num_lines, found)):,} lines;", end=" ")
    print(f"main path: {len(main_path)} files, {sum(map(num_lines, main_path)):,} lines")
    if unnamed := sorted({*found} - {*main_path, *beside}):
        sys.exit(f"{PAGE.relative_to(ROOT)} does not name {', '.join(unnamed)}")


if __name__ == "__main__":
    main()
