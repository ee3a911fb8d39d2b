"""Responses with turns: the same with and without what is kept of them between two turns."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.models import (
    VOCABULARY,
    answered,
    converse,
    make_engine,
    make_requests,
    run,
    sampling,
    tiny_model,
)

LENGTHS = (3, 3, 17, 1, 40, 9)
STOP = frozenset(range(0, VOCABULARY, 5))  # a fifth of what is sampled ends a turn


def count_converse(engine, requests, after=lambda: None):
    """Have every request's turns generated; return how many tokens the model ran."""
    return count(engine, lambda: converse(engine, engine.step, requests, 4, after))


def count(engine, work_is_done):
    """Return how many tokens the model runs meanwhile."""
    ran, model_runs = 0, engine._run

    def counted(work, cached):
        nonlocal ran
        ran += sum(item.num_new for item in work)
        return model_runs(work, cached)

    engine._run = counted
    work_is_done()
    engine._run = model_runs
    return ran


def fresh(max_new_tokens=80):
    return make_requests(LENGTHS, sampling(max_new_tokens=max_new_tokens, stop=STOP))


@pytest.mark.parametrize("capacity", [0, 100_000])
def test_tokens_are_the_same_whatever_is_kept_and_less_is_run(capacity):
    model = tiny_model()
    plain, kept = fresh(), fresh()
    all_of_it = count_converse(make_engine(model), plain)
    ran = count_converse(make_engine(model, kv_capacity=capacity), kept)
    assert [r.tokens for r in kept] == [r.tokens for r in plain]
    assert any(len(r.tokens) > r.turn_start > 0 for r in kept), "nobody had a second turn"
    if capacity == 0:
        assert ran == all_of_it
    else:
        # Every token is run once but the last one of each response, which nothing follows.
        shared = len(plain[1].prompt_ids) - 1
        assert ran == sum(len(r.prompt_ids) + len(r.tokens) - 1 for r in kept) - shared
        assert ran < all_of_it


@pytest.mark.parametrize("change", ["other weights", "other tokens"])
def test_what_is_kept_is_used_for_the_very_tokens_under_the_very_weights_only(change):
    model, seed = tiny_model(), 0
    engine, (request, *_) = make_engine(model, kv_capacity=1000), fresh()
    request.keeps_cache = True
    run(engine, [request])
    if change == "other weights":
        seed = 1
        model.load_state_dict(tiny_model(seed=seed).state_dict())
        engine.set_version(1, keep_cache=True)
    else:
        request.prompt_ids = [token + 1 for token in request.prompt_ids]
    answered(request, 2)
    again = replace(request, tokens=[*request.tokens], logprobs=[*request.logprobs], segments=[])
    run(engine, [request])
    run(make_engine(tiny_model(seed=seed)), [again])
    assert again.tokens == request.tokens
    assert again.logprobs == pytest.approx(request.logprobs, abs=1e-5)


def test_another_conversation_of_a_response_runs_what_no_earlier_one_begins_with():
    """An edited history, or a summary; what another response has said is none of it."""
    model = tiny_model()
    engine, (_, _, _, _, first, _) = make_engine(model, kv_capacity=1000), fresh(30)
    first.id, first.row_prompt, first.keeps_cache = ("a", 0), first.prompt_ids, True
    run(engine, [first])
    said = [*first.prompt_ids, *first.tokens]
    edited = [*said[:-3], 1, 2, 3, 4]
    for id, has in ((("b", 0), 0), (("a", 1), len(said) - 3), (("a", 2), len(edited) - 1)):
        how = sampling(max_new_tokens=5)
        again = replace(
            first, id=id, prompt_ids=edited, tokens=[], logprobs=[], segments=[], sampling=how
        )
        plain = replace(again, tokens=[], logprobs=[], segments=[])
        ran = count(engine, lambda again=again: run(engine, [again]))
        assert ran == len(edited) + len(again.tokens) - 1 - has
        run(make_engine(model), [plain])
        assert again.tokens == plain.tokens
        assert again.logprobs == pytest.approx(plain.logprobs, abs=1e-5)


@settings(max_examples=15)
@given(capacity=st.integers(0, 400), seqs=st.integers(1, 8), prefill=st.integers(3, 64))
def test_what_is_kept_never_takes_room_from_what_runs(capacity, seqs, prefill):
    model = tiny_model()

    def check():
        assert engine._kept.num_tokens == sum(s.cached for s in engine._kept._sequences.values())
        assert len(engine._kept._sequences) <= seqs
        slots = sum(len(c.slots) for c in engine._cache.size_classes.values())
        there = sum(s.slot is not None for s in engine._sequences.values())
        assert slots == there + len(engine._kept._sequences)

    requests, engine = fresh(40), make_engine(model, seqs, prefill, kv_capacity=capacity)
    count_converse(engine, requests, check)
    plain = fresh(40)
    count_converse(make_engine(model), plain)
    assert [r.tokens for r in requests] == [r.tokens for r in plain]
