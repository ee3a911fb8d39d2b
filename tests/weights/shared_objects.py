"""Objects that processes share, without processes: of one that is lost, nothing can be had."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from rhymeflow.utils import objects
from rhymeflow.utils.objects import OwnerLost


class FakeObjects:
    """An `objects.Objects` for which this process is all there are, one after the other."""

    def __init__(self) -> None:
        self.name, self.address = "learner", "127.0.0.1"
        self.lost: set[str] = set()
        self.fetched: list[int] = []  # bytes of each buffer that was fetched
        self.num_put = 0
        self._offered: dict = {}

    def put(self, data):
        self.num_put += 1
        return (self.name, data.copy())

    def get(self, references):
        for owner, data in references:
            if owner in self.lost:
                raise OwnerLost(owner)
            self.fetched.append(data.nbytes)
        return [_read_only(data) for _, data in references]

    def offer(self, name, function):
        self._offered[self.name, name] = function

    def ask(self, owner, name, *arguments):
        if owner in self.lost:
            raise OwnerLost(owner)
        return self._offered[owner, name](*arguments)


def _read_only(data: np.ndarray) -> np.ndarray:
    view = data.view()
    view.flags.writeable = False
    return view


@contextmanager
def sharing() -> Iterator[FakeObjects]:
    before, shared = objects._here, FakeObjects()
    objects.use(shared)
    try:
        yield shared
    finally:
        objects._here = before
