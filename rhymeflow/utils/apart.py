"""A call in a process of its own, for what imports a user's code.

Holds true: this process imports nothing of the user's; what the call raises is raised here.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from rhymeflow.errors import UserError
from rhymeflow.utils import main_module

START_SECONDS = 600.0
"""That a process may take to import a user's code."""


def apart(function: Callable[..., Any], argument: Any, names: Iterable[str]) -> Any:
    """Return `function(argument)`, of a module's function.

    Raises:
        UserError: the process ended; `names` are what it may have imported.
    """
    context = multiprocessing.get_context("spawn")
    as_any_program = multiprocessing.set_start_method, (None, True)  # for the user's processes
    try:
        with ProcessPoolExecutor(1, context, *as_any_program) as pool:
            with main_module.left_out():
                asked = pool.submit(function, argument)
            return asked.result(START_SECONDS)
    except BrokenProcessPool:
        raise UserError(f"{', '.join(names)}: importing them ended the process") from None
