"""The house's import rules that layers cannot say: what is loaded, and what the coordinator may
know."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "rhymeflow"

HEAVY = {
    "torch", "transformers", "datasets", "pyarrow", "pandas", "numpy", "ray", "trl", "accelerate",
    "huggingface_hub", "tensorboard", "rich",
}  # fmt: skip

IMPURE = {
    "time", "datetime", "random", "secrets", "os", "io", "socket", "asyncio", "threading",
    "multiprocessing", "subprocess", "signal", "select", "sqlite3", "pathlib", "tempfile",
    "logging", "sys", "uuid",
}  # fmt: skip
"""Standard modules that bring in a clock, chance, or the world."""


def loaded_by(statement: str, *modules: str) -> set[str]:
    """Top-level modules in `sys.modules` of a new process after `statement` and these imports."""
    statement += "".join(f"\nimport {name}" for name in modules)
    code = f"{statement}\nimport sys\nprint(*sorted({{n.partition('.')[0] for n in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stdout.split())


def modules_of(*packages: str) -> list[str]:
    """Dotted names of the packages' modules."""
    files = [file for package in packages for file in (PACKAGE / package).rglob("*.py")]
    assert len({file.relative_to(PACKAGE).parts[0] for file in files}) == len(packages)
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names]


def test_importing_these_loads_nothing_heavy():
    these = modules_of("config", "trainer", "cli", "core", "data", "environments")
    these.remove("rhymeflow.data.verifiers_tasks")  # a script for a Python that has verifiers
    loaded = loaded_by("", *these)
    assert "rhymeflow" in loaded
    assert not loaded & HEAVY


def test_looking_at_a_run_loads_no_configuration():
    """It takes longer to import than to look."""
    looked = loaded_by(
        "from rhymeflow.cli import main, runs\n"
        "try: main(['dashboard', '--help'])\nexcept SystemExit: pass\n"
        "import rhymeflow.dashboard.serve"
    )
    assert "starlette" in looked
    assert not looked & ({"pydantic", "ruamel", "rich", *HEAVY} - {"numpy"})


def test_the_history_process_and_the_scheduler_load_no_torch():
    workers = ("rhymeflow.workers.entry", "rhymeflow.workers.history")
    these = *modules_of("histospec"), *workers, "rhymeflow.engine.native.scheduler"
    assert not loaded_by("", *these) & (HEAVY - {"numpy"})


def test_the_coordinator_needs_the_standard_library_only():
    at_start = loaded_by("")  # site packages may load modules of their own at start
    third_party = loaded_by("", *modules_of("core")) - at_start - set(sys.stdlib_module_names)
    assert third_party == {"rhymeflow"}


def test_the_controller_knows_no_processes_no_database_and_no_torch():
    """It is handed a runtime, a store, a learner group and an index, whatever is behind them."""
    behind_seams = {"multiprocessing", "mmap", "sqlite3", "torch", "transformers", "numba"}
    loaded = loaded_by("import rhymeflow.runtime.controller")
    assert "rhymeflow" in loaded
    assert not loaded & behind_seams


def imports_of(file: Path) -> set[str]:
    """Top-level names of everything a file imports, wherever the import stands in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import"
            found.add(node.module or "")
    return found


def test_the_coordinator_knows_no_clock_no_chance_no_world():
    for file in (PACKAGE / "core").rglob("*.py"):
        for name in imports_of(file):
            top = name.partition(".")[0]
            assert top not in IMPURE, f"{file.name} imports {name}"
            assert top == "rhymeflow" or top in sys.stdlib_module_names, f"{file.name}: {name}"


def test_the_public_names_are_there():
    import rhymeflow

    for name in rhymeflow.__all__:
        assert getattr(rhymeflow, name) is not None
    with pytest.raises(AttributeError, match="trian"):
        rhymeflow.trian  # noqa: B018


def test_every_folder_is_a_package():
    """Without `__init__.py` an installer leaves the folder out."""
    folders = {file.parent for file in PACKAGE.rglob("*.py")}
    assert [each for each in folders if not (each / "__init__.py").is_file()] == []
