"""How far a running response is, by its instance's clock, against how far it really is."""

import numpy as np
import pytest

from rhymeflow.core.events import Snapshot
from rhymeflow.core.instance import Instance
from tests.engine.drafters import FakeDrafter, noisy
from tests.engine.models import make_engine, make_requests, run, sampling, tiny_model

COUNT = 16
YOUNG = 20  # tokens from which on a response is compared


def requests_of():
    requests = make_requests([4 + i for i in range(COUNT)])
    for i, request in enumerate(requests):
        request.sampling = sampling(max_new_tokens=40 + 31 * i % 97)
    return requests


def errors(draft, *, every=1):
    """Of each response at each snapshot: estimate less truth, over truth. An instance decodes four
    at a time and says how it is after so many iterations. A response is routed as soon as another
    has ended."""
    model, answered = tiny_model(), requests_of()
    run(make_engine(model), answered)
    answers = {(tuple(r.prompt_ids), r.noise_key.sample): r.tokens for r in answered}
    drafter = None if draft is None else FakeDrafter(draft, answers)
    engine = make_engine(model, max_num_seqs=4, max_prefill_tokens=400, drafter=drafter)
    seen, left = Instance("a", 0, 4, 10_000), list(reversed(requests_of()))
    found, iterations = [], 0
    running = {}
    while left or running:
        while left and len(running) < 6:  # two of them wait
            request = left.pop()
            running[request.id] = request
            seen.assign(request.id, 0)
            engine.submit(request)
        for request, _ in engine.step():
            seen.finished(request.id, 0)
            del running[request.id]
        iterations += 1
        if iterations % every == 0:
            load = engine.load()
            seen.reflect(Snapshot("a", 0, load.waiting, 0, load.clock))
            for request in running.values():
                if len(request.tokens) >= YOUNG:
                    truth = len(request.tokens)
                    found.append((seen.generated(request.id) - truth) / truth)
    return np.array(found)


@pytest.mark.parametrize("every", [1, 5])
def test_without_drafts_it_is_known_to_the_age_of_a_snapshot(every):
    found = np.abs(errors(None, every=every))
    assert found.max() <= every / YOUNG
    assert found.mean() < 0.05


def test_with_drafts_of_any_kind_it_is_right_on_average():
    found = errors(noisy(0.7, 8))
    assert abs(found.mean()) < 0.1
    assert np.abs(found).mean() < 0.2
