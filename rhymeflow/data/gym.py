"""Imports reasoning-gym, also where pycosat is missing, which needs a C compiler to be installed.

reasoning-gym imports pycosat for one of its hundred datasets, and with it whenever it is imported.

Holds true: without pycosat that dataset is refused by a `UserError`; all others are as with it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import NoReturn

from rhymeflow.errors import UserError
from rhymeflow.utils.extras import how_to_install


def reasoning_gym(needed_for: str) -> ModuleType:
    """Return the module.

    Raises:
        UserError: it, or what it needs, is not installed.
    """
    if "pycosat" not in sys.modules and importlib.util.find_spec("pycosat") is None:
        sys.modules["pycosat"] = _pycosat_that_is_missing()
    try:
        return importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        raise UserError(
            f"{needed_for} needs the package {error.name}: {how_to_install('reasoning')}"
        ) from None


def _pycosat_that_is_missing() -> ModuleType:
    def itersolve(*_: object, **__: object) -> NoReturn:
        raise UserError(
            "reasoning_gym:zebra_puzzles needs the package pycosat, which is compiled when it is "
            "installed: pip install pycosat"
        )

    module = ModuleType("pycosat")
    module.itersolve = itersolve  # type: ignore[attr-defined]
    return module
