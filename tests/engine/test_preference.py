"""What some requests are worth to the drafter; and the clock, by which lengths are estimated."""

from __future__ import annotations

import pytest

from tests.engine.drafters import DRAFTS, FakeDrafter, right
from tests.engine.exactness import answers_of, assert_same, model_of, requests_of, undrafted
from tests.engine.models import make_engine, run

RIGHT = right(2)


def engine_of(draft=RIGHT, **options):
    """An engine, its drafter, the requests for it and what must come of them."""
    expected, reasons = undrafted("plain", "float32")
    drafter = FakeDrafter(draft, answers_of(expected))
    engine = make_engine(model_of("float32"), drafter=drafter, max_prefill_tokens=400, **options)
    return engine, drafter, requests_of("plain"), (expected, reasons)


def test_the_drafter_hears_of_weights_only_where_there_are_any():
    engine, drafter, requests, _ = engine_of()
    for request in requests[:3]:
        engine.submit(request)
    engine.prefer(["gone", 1], 4.0)
    for _ in range(3):
        engine.step()
    assert drafter.weights == [[1.0, 4.0, 1.0]] * 2, "the first iteration prefills prompts"
    engine.prefer([0], 3.0)
    engine.step()
    assert drafter.weights[-1] == [3.0, 1.0, 1.0], "the last call holds, and no other"
    for ids, weight in (([], 3.0), ([0, 1], 1.0), (["gone"], 5.0)):
        engine.prefer(ids, weight)
        engine.step()
        assert drafter.weights[-1] is None


def test_one_that_comes_later_is_preferred_too():
    engine, drafter, requests, _ = engine_of()
    engine.prefer([1], 2.5)
    engine.submit(requests[0])
    engine.step()
    engine.step()
    assert drafter.weights == [None]
    engine.submit(requests[1])
    engine.step()
    engine.step()
    assert drafter.weights[-1] == [1.0, 2.5]
    (request,) = engine.interrupt([1])
    engine.step()
    assert drafter.weights[-1] is None
    engine.submit(request)
    engine.step()
    engine.step()
    assert drafter.weights[-1] == [1.0, 2.5], "gone for a while and back"


@pytest.mark.parametrize("drafts", ["none", "half right", "right tree"])
def test_preference_changes_no_token(drafts):
    engine, drafter, requests, (expected, reasons) = engine_of(DRAFTS[drafts])
    for request in requests:
        engine.submit(request)
    found, turn = {}, 0
    while engine.has_work:
        engine.prefer([turn % 5, 7, turn % 11], 1.0 + turn % 4)
        found.update({request.id: reason for request, reason in engine.step()})
        turn += 1
    assert found == reasons
    assert_same(requests, expected)
    assert any(drafter.weights)


def test_with_drafts_the_clock_is_the_mean_of_those_decoded():
    engine, _, requests, _ = engine_of(DRAFTS["mostly right"])
    run(engine, requests[:0])
    for request in requests[:3]:
        engine.submit(request)
    clock = 0.0
    while engine.has_work:
        before = [len(request.tokens) for request in requests]
        engine.step()
        generated = [len(r.tokens) - n for r, n in zip(requests, before, strict=True)]
        decoded = [count for count in generated if count]
        clock += sum(decoded) / len(decoded)
        assert engine.clock == pytest.approx(clock)
    steps = max(request.steps for request in requests[:3])
    assert clock > 1.5 * steps
