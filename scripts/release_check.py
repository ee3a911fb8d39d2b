"""Builds sdist and wheel, and tries the wheel in a clean environment, outside of the checkout.

python scripts/release_check.py

The wheel is built from the sdist. Version, changelog and metadata have to agree, the command has to
run, and nothing that it needs may be missing from the wheel.
"""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import install

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
COMMANDS = (
    ("--version",),
    ("recipes",),
    ("train", "demo", "--learner.max_steps", "3", "--run.output_dir", "run"),
    ("inspect", "run"),
    ("simulate", "demo"),
    ("doctor",),
)
"""Each is given to `rhymeflow` in an empty directory."""
NOT_SHIPPED = "tests/", "benchmarks/", ".ci/", "runs/"


def main() -> int:
    """Build and try; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="rhymeflow-release-") as folder:
        sdist, wheel = build(Path(folder))
        problems = [*of_metadata(wheel), *of_files(sdist, wheel)]
        if not problems:
            problems = of_commands(wheel, Path(folder))
    for each in problems:
        print(f"release: {each}", file=sys.stderr)
    if not problems:
        print(f"{sdist.name} and {wheel.name} in {DIST} can be released")
    return min(len(problems), 1)


def run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command without input, and return what it printed."""
    return subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def build(folder: Path) -> tuple[Path, Path]:
    """Build both, the wheel from the sdist, by a `build` in an environment of its own."""
    for old in DIST.glob("rhymeflow-*"):
        old.unlink()
    python = new_environment(folder / "build")
    for command in (("pip", "install", "-q", "build"), ("build", "--outdir", DIST, ROOT)):
        done = run(python, "-m", *command)
        if done.returncode != 0:
            sys.exit(f"release: {done.stdout}{done.stderr}")
    return next(DIST.glob("*.tar.gz")), next(DIST.glob("*.whl"))


def new_environment(folder: Path) -> Path:
    """Make a virtual environment, and return its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder / "bin" / "python"


def of_metadata(wheel: Path) -> list[str]:
    """Return what does not agree in version, changelog and the wheel's metadata."""
    with zipfile.ZipFile(wheel) as file:
        name = next(each for each in file.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(file.read(name))
    version, problems = metadata["Version"], []
    changes = re.search(r"^## (\S+) \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if changes is None or changes[1] != version:
        problems.append(f"CHANGELOG.md does not begin with {version}")
    for field in ("Summary", "Requires-Python", "License-Expression", "Description-Content-Type"):
        if not metadata[field]:
            problems.append(f"the wheel's metadata has no {field}")
    return problems


def of_files(sdist: Path, wheel: Path) -> list[str]:
    """Return what is missing in the wheel, or is there and should not be."""
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        code = {name: file.read(name) for name in names if name.startswith("rhymeflow/")}
    listed = run("git", "ls-files", "rhymeflow").stdout.split()
    problems = [f"{wheel.name} lacks {each}" for each in sorted({*listed} - names)]
    hints = sorted(name for name, text in code.items() if b"rhymeflow[" in text)
    problems += [f"{each} names an extra of rhymeflow, which no index has" for each in hints]
    problems += [f"{wheel.name} has {each}" for each in names if each.startswith(NOT_SHIPPED)]
    with tarfile.open(sdist) as file:
        inside = {each.partition("/")[2] for each in file.getnames()}
    needed = {"pyproject.toml", "README.md", "LICENSE", *listed}
    return problems + [f"{sdist.name} lacks {each}" for each in sorted(needed - inside)]


def of_commands(wheel: Path, folder: Path) -> list[str]:
    """Install the wheel, and return what fails in an empty directory."""
    python, empty = new_environment(folder / "clean"), folder / "empty"
    empty.mkdir()
    install.PYTHON = str(python)
    index = install.index_arguments(install.has_nvidia_gpu(), install.plan)
    done = run(python, "-m", "pip", "install", "-q", *index, wheel, cwd=empty)
    if done.returncode != 0:
        return [f"pip: {done.stderr}"]
    version = wheel.name.split("-")[1]
    for command in COMMANDS:
        done = run(python.with_name("rhymeflow"), *command, cwd=empty)
        print(f"rhymeflow {' '.join(command)}: {done.returncode}", flush=True)
        if done.returncode != 0:
            return [f"rhymeflow {' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"]
        if command == ("--version",) and done.stdout != f"rhymeflow {version}\n":
            return [f"rhymeflow --version: {done.stdout}"]
    return []


if __name__ == "__main__":
    sys.exit(main())
