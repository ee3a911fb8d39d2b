"""The installer's choice of torch: no CUDA packages without a GPU, if that can be had."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CUDA_PLAN = ["torch", "nvidia-cublas-cu12", "triton", "sympy"]
CPU_PLAN = ["torch", "sympy"]


@pytest.fixture(scope="module")
def install():
    spec = importlib.util.spec_from_file_location("install", ROOT / "scripts" / "install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_gpu_takes_what_pip_takes(install) -> None:
    def plan(arguments):
        raise AssertionError("nothing to ask")

    assert install.index_arguments(True, plan) == []


def test_a_cpu_build_needs_no_other_index(install) -> None:
    assert install.index_arguments(False, lambda arguments: CPU_PLAN) == []


def test_cuda_packages_make_it_look_into_the_cpu_index(install) -> None:
    added = install.index_arguments(False, lambda more: CPU_PLAN if more else CUDA_PLAN)
    assert added == ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]


def test_it_warns_where_there_is_no_cpu_build(install, capsys: pytest.CaptureFixture[str]) -> None:
    assert install.index_arguments(False, lambda more: CUDA_PLAN) == []
    assert "WARNING: this machine has no NVIDIA GPU" in capsys.readouterr().err


def test_cuda_packages_are_known(install) -> None:
    names = [
        "nvidia-nccl-cu13",
        "cuda-bindings",
        "triton",
        "pytorch-triton",
        "torch",
        "tritonclient",
    ]
    assert install.cuda_packages(names) == names[:4]


def test_an_old_python_is_told(install, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(install.sys, "version_info", (3, 9, 2))
    monkeypatch.setattr(install.shutil, "which", lambda name: None)
    assert install.main([]) == 1
    assert "needs Python 3.11 or newer" in capsys.readouterr().err


def test_an_old_python_calls_a_newer_one(install, monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(install.sys, "version_info", (3, 9, 2))
    monkeypatch.setattr(
        install.shutil, "which", lambda name: f"/bin/{name}" if name == "python3.12" else None
    )
    monkeypatch.setattr(install.subprocess, "call", lambda command: calls.append(command) or 0)
    monkeypatch.setattr(install.sys, "argv", ["install.py", "test"])
    assert install.main(["test"]) == 0
    assert [calls[0][0], calls[0][-1]] == ["/bin/python3.12", "test"]


def test_the_least_python_is_the_packages(install) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">={}.{}".format(*install.LEAST)


def test_it_loads_the_standard_library_only() -> None:
    code = (
        "import sys; before = set(sys.modules); import runpy\n"
        f"runpy.run_path({str(ROOT / 'scripts' / 'install.py')!r})\n"
        "new = {n.partition('.')[0] for n in set(sys.modules) - before}\n"
        "assert new <= set(sys.stdlib_module_names), new"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
