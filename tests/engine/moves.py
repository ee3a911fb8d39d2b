"""Two drafted engines between which responses are moved."""

import itertools

from rhymeflow.engine.base import Segment
from tests.engine.drafters import FakeDrafter
from tests.engine.models import make_engine


class Moves:
    """Two drafted engines, and what segments the moves between them must lead to."""

    def __init__(self, model, draft, answers, **options):
        self.engines = {
            name: make_engine(
                model, instance=name, drafter=FakeDrafter(draft, answers, seed=i), **options
            )
            for i, name in enumerate("ab")
        }
        self.at = {}
        self.stays = {}
        self.reasons = {}

    def submit(self, request, name):
        self.at[request.id] = name
        self.stays.setdefault(request.id, []).append((len(request.tokens), name))
        self.engines[name].submit(request)

    def step(self):
        for engine in self.engines.values():
            self.reasons.update({request.id: reason for request, reason in engine.step()})

    def move(self, chosen):
        """Interrupt (id, whether to go elsewhere) and submit again what is not complete."""
        for key, is_elsewhere in chosen:
            name = self.at[key]
            for request in self.engines[name].interrupt([key]):
                self.submit(request, "ba"[name == "b"] if is_elsewhere else name)

    def finish(self):
        while any(engine.has_work for engine in self.engines.values()):
            self.step()
        for engine in self.engines.values():
            assert not engine._drafting._drafter.texts
            assert engine.kv_tokens == 0
        return self.reasons

    def segments(self, request):
        """By the direct rule: a segment where a stay elsewhere generated something."""
        stays = [*self.stays[request.id], (len(request.tokens), None)]
        generated = [
            (start, name) for (start, name), (end, _) in itertools.pairwise(stays) if end > start
        ]
        found = [Segment(start, 0, name) for start, name in generated]
        same = [i for i in range(1, len(found)) if found[i].instance == found[i - 1].instance]
        return [segment for i, segment in enumerate(found) if i not in same]
