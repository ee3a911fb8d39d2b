"""Tries both ends of pyproject.toml's ranges, and writes what ran to docs/install.md.

Each end gets an environment of its own (`.venv-pins-oldest`, `.venv-pins-newest`) with the least or
the newest minor version of torch, transformers, ray and trl that is allowed, in which the fast
tests run, and those of models, learner and TRL. Without a GPU, torch's build for CUDA is taken only
if there is none for CPUs; the page says so. vLLM has its own environment (scripts/install_vllm.py).
`python3 scripts/try_pins.py [END ...]`; standard library.
"""

import datetime
import os
import re
import subprocess
import sys

import install

PACKAGES = ("torch", "transformers", "ray", "trl")
FAST = ("config", "core", "data", "observe", "reward", "store", "utils", "weights", "workers")
TESTS = (*FAST, "families", "learner", "models", "trl")
PAGE = os.path.join(install.ROOT, "docs", "install.md")


def main(ends):
    """Try these ends; return 1 if a test failed."""
    code = 0
    for end in ends:
        versions, result = tried(end)
        write_row(PAGE, end, versions, result, datetime.date.today())
        code |= result == "failed"
    return int(code)


def tried(end):
    """Make the environment of an end and run the tests; return versions and the result."""
    install.VENV = os.path.join(install.ROOT, f".venv-pins-{end}")
    install.PYTHON = os.path.join(install.VENV, "bin", "python")
    install.make_venv()
    with open(os.path.join(install.ROOT, "pyproject.toml"), encoding="utf-8") as file:
        text = file.read()
    wanted = requirements(text, end)
    install.WANTED_TORCH = wanted[0]
    has_gpu = install.has_nvidia_gpu()
    index = install.index_arguments(has_gpu, install.plan)
    is_for_cuda = not has_gpu and install.cuda_packages(install.plan(index))
    target = f"{install.ROOT}[test,ray]"
    asked = [*index, *wanted, "--editable", target], ["--no-deps", *install.WITHOUT_DEPENDENCIES]
    if any([install.start_pip("install", *install.QUICKLY, *each).wait() for each in asked]):
        return {}, "not tried: pip could not install it"
    tests = [os.path.join("tests", name) for name in TESTS]
    chosen = ["-m", "not slow and not ray and not gpu", "-p", "no:cacheprovider"]
    command = [install.PYTHON, "-m", "pytest", "-q", *chosen, *tests]
    code = subprocess.call(command, cwd=install.ROOT)
    build = " on a CPU, with torch's build for CUDA" if is_for_cuda else ""
    result = "failed" if code else f"fast tests passed{build}"
    return {name: version(name) for name in PACKAGES}, result


def requirements(pyproject, end):
    """Return what pip is asked for: the least minor that a range allows, or all of the range."""
    found = []
    for name in PACKAGES:
        least, rest = re.search(rf'"{name}>=([\d.]+)([^"]*)"', pyproject).groups()
        found.append(f"{name}=={least}.*" if end == "oldest" else f"{name}>={least}{rest}")
    return found


def version(name):
    """Return the version that is installed."""
    code = f"from importlib.metadata import version; print(version({name!r}))"
    return subprocess.check_output([install.PYTHON, "-c", code], text=True).strip()


def write_row(page, end, versions, result, day):
    """Replace an end's row in the page's table of what was tried."""
    with open(page, encoding="utf-8") as file:
        text = file.read()
    cells = [f"{end} of `make test-pins`", *(versions.get(name, "") for name in PACKAGES)]
    row = "| " + " | ".join([*cells, "", result, f"{day:%Y-%m-%d}"]) + " |\n"
    text, count = re.subn(rf"^\| {end} of .*\n", lambda _: row, text, flags=re.MULTILINE)
    assert count == 1, f"{page} has {count} rows of {end}"
    with open(page, "w", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["oldest", "newest"]))
