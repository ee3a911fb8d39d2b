"""The controller's side of history: owns the shared index, and replaces the process that fills it.

Holds true: the memory is given back when the run ends, by this process or, if it was killed, by its
resource tracker; the index stays where it is when its writer is replaced, so readers notice
nothing; a writer that dies, hangs or has a defect costs drafts and never the run.
"""

from __future__ import annotations

from collections.abc import Callable

from rhymeflow.config import DraftingConfig
from rhymeflow.errors import UserError
from rhymeflow.histospec.handle import IndexHandle
from rhymeflow.histospec.index import Index
from rhymeflow.runtime.process import WorkerDied
from rhymeflow.runtime.workers import Workers
from rhymeflow.workers import messages


class HistoryIndex:
    """The index of a run that drafts; of one that does not, nothing. `warn` tells the user."""

    def __init__(
        self, config: DraftingConfig, workers: Workers, warn: Callable[[str], None]
    ) -> None:
        self._workers, self._warn = workers, warn
        self.is_ready = False
        """Whether there is an index to draft from, and drafting is compiled."""
        self._index = None
        if config.window != "off":
            self._index = Index(
                max_tokens=config.history_tokens,
                max_responses=config.history_responses,
                shared=True,
            )

    @property
    def handle(self) -> IndexHandle | None:
        """Where instances find the index."""
        return None if self._index is None else self._index.handle

    def metrics(self) -> dict[str, float]:
        """How much there is to draft from."""
        return {} if self._index is None else {"draft/history_tokens": self._index.num_tokens}

    def start(self) -> None:
        """The store is there: the process can read it."""
        if self._index is not None:
            self._feed()

    def receive(self, now: float, patience: float) -> None:
        """Hear the process; replace it if it ended or hangs."""
        worker = self._workers.history
        if worker is None:
            return
        try:
            for message in worker.messages(now):
                assert isinstance(message, messages.HistoryReady | messages.HistoryAlive), message
                self.is_ready = True
            worker.check(now, patience)
        except (WorkerDied, UserError) as loss:
            self._replace(loss)

    def _replace(self, loss: WorkerDied | UserError) -> None:
        first, *rest = str(loss).splitlines()
        what = " ".join([first, *rest[-1:]])  # of a traceback, what it ends in: its log has it all
        if self._workers.replace_history():
            self._feed()
            self._warn(f"{what}; drafts begin anew from what is stored, the run goes on")
        else:
            self._warn(
                f"{what}; it was replaced as often as may be (run.instance_restarts), the run goes "
                "on and drafts from what history there is"
            )

    def _feed(self) -> None:
        assert self._index is not None
        assert self._workers.history is not None
        self._workers.history.send(messages.IndexHistory(self._index.handle))

    def close(self) -> None:
        """Give the memory back."""
        if self._index is not None:
            self._index.close()
            self._index = None
