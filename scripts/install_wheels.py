"""Unpacks what a Python lacks from a folder of wheels: `python3 scripts/install_wheels.py DIR TO`.

For machines without a network: `make gpu GPU_WHEELS=DIR`. Packages that are there stay as they are;
TO is to be on PYTHONPATH. Then what Rhymeflow itself needs is compared with what there is.
"""

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
TESTS = ["pytest", "pytest-timeout", "hypothesis", "psutil"]
"""What `bench gpu` needs besides: it runs marked tests, and kills workers."""


def main(folder, target):
    """Unpack, and say what is still missing; return the exit code."""
    sys.path.insert(0, target)
    wheels = [str(wheel) for wheel in sorted(Path(folder).glob("*.whl")) if is_missing(wheel.name)]
    if wheels:
        options = ["--no-index", "--no-deps", "--quiet", "--target", target]
        code = subprocess.call([sys.executable, "-m", "pip", "install", *options, *wheels])
        if code:
            return code
    print(f"{len(wheels)} packages of {folder} are unpacked into {target}")
    needed = re.search(r"^dependencies = \[(.*?)^\]", PROJECT.read_text(), re.M | re.S).group(1)
    names = re.findall(r'^ *"([\w.-]+)', needed, re.M) + TESTS
    if missing := [name for name in names if is_missing(name)]:
        print(f"still missing: {' '.join(missing)}", file=sys.stderr)
    return 0


def is_missing(name):
    """Return whether this Python lacks a package, or the package of a wheel with this name."""
    importlib_name = name.partition("-")[0] if name.endswith(".whl") else name
    try:
        metadata.version(importlib_name)
    except metadata.PackageNotFoundError:
        return True
    return False


if __name__ == "__main__":
    if len(sys.argv) != 3 or not os.path.isdir(sys.argv[1]):
        sys.exit(f"install_wheels: {' '.join(sys.argv[1:2]) or 'DIR'} is no folder of wheels")
    sys.exit(main(*sys.argv[1:]))
