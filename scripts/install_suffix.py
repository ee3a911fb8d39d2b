"""Gives `.venv-vllm` what vLLM's `suffix` decoding needs: `python3 scripts/install_suffix.py DIR`.

For `rhymeflow bench vllm --suffix`. DIR is a checkout of github.com/snowflakedb/ArcticInference.
Of that package vLLM uses the suffix cache only, one C++ extension and two Python files; installing
all of it wants another torch and fails beside vLLM 0.32. So the extension is built here (cmake, a
C++ compiler), and those files are copied beside it.

Holds true: standard library only; the same call a second time changes nothing.
"""

import glob
import os
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PYTHON = os.path.join(ROOT, ".venv-vllm", "bin", "python")
NANOBIND = "nanobind==2.9.2"
PACKAGE = "arctic_inference"
FILES = ["__init__.py", "suffix_decoding/__init__.py", "suffix_decoding/cache.py"]


def main(checkout):
    """Build and copy; return the exit code."""
    sources = os.path.join(checkout, "csrc", "suffix_decoding")
    for path, what in ((PYTHON, "run scripts/install_vllm.py first"), (sources, "no checkout")):
        if not os.path.exists(path):
            return complain(path + " is not there: " + what)
    commands = [[PYTHON, "-m", "pip", "--quiet", "install", NANOBIND]]
    with tempfile.TemporaryDirectory() as build:
        configure = ["-DPython_EXECUTABLE=" + PYTHON, "-DCMAKE_BUILD_TYPE=Release"]
        commands.append(["cmake", "-S", os.path.abspath(sources), "-B", build, *configure])
        commands.append(["cmake", "--build", build])
        for command in commands:
            if subprocess.call(command):
                return complain(" ".join(command[:4]) + " failed; its message stands above")
        copy(checkout, glob.glob(os.path.join(build, "_C.*.so")))
    return 0


def copy(checkout, extensions):
    """Put the files where vLLM's Python finds them."""
    ask = [PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))"]
    into = os.path.join(subprocess.check_output(ask, text=True).strip(), PACKAGE)
    os.makedirs(os.path.join(into, "suffix_decoding"), exist_ok=True)
    for name in FILES:
        shutil.copy(os.path.join(checkout, PACKAGE, name), os.path.join(into, name))
    for path in extensions:
        shutil.copy(path, os.path.join(into, "suffix_decoding"))


def complain(message):
    """Say it on stderr; return the exit code of a failure."""
    print("install_suffix: " + message, file=sys.stderr)
    return 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(complain("needs the directory of a checkout of ArcticInference"))
    sys.exit(main(sys.argv[1]))
