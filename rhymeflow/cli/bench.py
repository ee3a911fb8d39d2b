"""`rhymeflow bench`: the benchmarks of the checkout that the package runs from."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path
from types import ModuleType

from rhymeflow.cli.parser import Parser
from rhymeflow.errors import UserError, suggestion

_NO_BENCHMARKS = ("harness",)
"""Modules beside the benchmarks: what they share."""


def bench(arguments: list[str]) -> int:
    """Run `benchmarks/NAME.py`; without a name, list them."""
    benchmarks = _benchmarks()
    names = sorted(
        module.name
        for module in pkgutil.iter_modules(benchmarks.__path__)
        if not module.ispkg and module.name not in _NO_BENCHMARKS
    )
    parser = Parser(prog="rhymeflow bench", allow_abbrev=False)
    if not arguments or arguments[0].startswith("-"):
        parser.add_argument("name", nargs="?", metavar="NAME", help=", ".join(names))
        parser.parse_args(arguments)
        print(f"benchmarks: {', '.join(names)} (rhymeflow bench NAME --help)")
        return 0
    name = arguments[0]
    if name not in names:
        hint = suggestion(name, names)
        raise UserError(f"bench {name}: there is no such benchmark ({', '.join(names)}){hint}")
    module = importlib.import_module(f"benchmarks.{name}")
    parser.prog += f" {name}"
    parser.description = (module.__doc__ or "").partition("\n")[0]
    importlib.import_module("benchmarks.harness").add_common_arguments(parser)
    module.add_arguments(parser)
    module.run(parser.parse_args(arguments[1:]))
    return 0


def _benchmarks() -> ModuleType:
    """Import the benchmarks of the checkout that this package runs from."""
    root = Path(__file__).resolve().parent.parent.parent
    if not (root / "benchmarks" / "harness.py").is_file():
        raise UserError(
            f"bench: the benchmarks are not beside the installed package ({root}); they are part "
            "of the source: clone it and install with `pip install -e .`"
        )
    sys.path.insert(0, str(root))
    return importlib.import_module("benchmarks")
