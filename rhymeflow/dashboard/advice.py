"""What the simulator would change about a run, asked for by a click and found in a process of its
own: it takes seconds of a core, which neither the run nor other questions should wait for."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rhymeflow.dashboard.run import Run
from rhymeflow.errors import UserError

if TYPE_CHECKING:
    from rhymeflow.sim.advice import Advice

_NICENESS = 10


class Advisor:
    """Has runs simulated, one at a time."""

    def __init__(self) -> None:
        """No process is started before something is asked."""
        self._lock = threading.Lock()
        self._pool: ProcessPoolExecutor | None = None
        self._asked: dict[str, Future[Advice | str]] = {}

    def found(self, run: Run, *, anew: bool = False) -> dict[str, Any]:
        """`{"working": True}`, or what was found; with `anew` it is found again. Raises `UserError`
        if the run cannot be simulated."""
        with self._lock:
            asked = self._asked.get(run.name)
            if asked is None or (anew and asked.done()):
                if self._pool is None:
                    context = get_context("spawn")
                    self._pool = ProcessPoolExecutor(1, context, os.nice, (_NICENESS,))
                asked = self._asked[run.name] = self._pool.submit(_advise, run.directory)
        if not asked.done():
            return {"working": True}
        advice = asked.result()
        if isinstance(advice, str):
            raise UserError(advice)
        return vars(advice) | {"recommended": advice.recommended}


def _advise(run_dir: Path) -> Advice | str:
    """What was found, or why nothing was: errors of the user have arguments that do not travel."""
    from rhymeflow.sim.advice import advise  # loads the simulator, which pages do without

    try:
        return advise(run_dir)
    except UserError as error:
        return str(error)
