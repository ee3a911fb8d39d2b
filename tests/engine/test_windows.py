"""Models that see a few tokens back: their cache is short, and nothing that they see is missing."""

import copy

import pytest
import torch

from rhymeflow.engine.base import NoiseKey, Request
from rhymeflow.engine.native.cache import FIRST_CAPACITY
from tests.engine.drafters import FakeDrafter, answers_of, tree
from tests.engine.models import SIZES, VOCABULARY, answered, make_engine, run, sampling
from tests.families.cases import WINDOWS
from tests.learner import builders

KINDS = {
    "mistral": {"sliding_window": 20},
    "llama4_text": {
        **WINDOWS["llama4_text"], "attention_chunk_size": 48, "no_rope_layers": [1, 1, 1],
    },
}  # fmt: skip
LENGTH, NEW = 290, 300


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    sizes = {**SIZES, "max_position_embeddings": 1000, "head_dim": 8}
    return builders.tiny_model(request.param, tied=False, **{**sizes, **KINDS[request.param]})


def request_of(i, length=LENGTH, max_new_tokens=NEW, stop=()):
    prompt = [(7 * j + j * j) % VOCABULARY for j in range(length)]
    how = sampling(max_new_tokens=max_new_tokens, stop=stop)
    return Request(i, prompt, NoiseKey(1, 0, i), how)


def right_logprobs(model, request):
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        logits_TV = plain(torch.tensor([request.prompt_ids + request.tokens])).logits[0]
    logprob_TV = logits_TV[len(request.prompt_ids) - 1 : -1].log_softmax(-1)
    return logprob_TV.gather(1, torch.tensor(request.tokens)[:, None])[:, 0].tolist()


def test_what_was_given_back_is_not_copied_to_a_prompt_that_begins_alike(model):
    engine, first, other = make_engine(model), request_of(0), request_of(1)
    other.prompt_ids[64:] = [each + 1 for each in other.prompt_ids[64:]]
    engine.submit(first)
    while not getattr(engine._sequences[first.id].slot, "start", 0):
        engine.step()
    run(engine, [other])
    for request in (first, other):
        assert request.logprobs == pytest.approx(right_logprobs(model, request), abs=1e-4)


def test_a_long_response_needs_no_more_cache_than_a_short_one(model):
    """One of two shares the prompt, one comes when the prompt was given back."""
    engine, requests = make_engine(model), [request_of(i) for i in range(3)]
    for request in requests[:2]:
        engine.submit(request)
    held = []
    while engine.has_work:
        if len(requests[0].tokens) == NEW // 2 and requests[2].id not in engine._sequences:
            engine.submit(requests[2])
        engine.step()
        held.append(engine.kv_tokens)
        assert set(engine._cache.size_classes) == {FIRST_CAPACITY}
    assert max(held) <= 3 * FIRST_CAPACITY
    for request in requests:
        assert len(request.tokens) == NEW
        assert request.logprobs == pytest.approx(right_logprobs(model, request), abs=1e-4)


def test_drafts_and_turns_change_nothing(model):
    expected = [request_of(i) for i in range(2)]
    run(make_engine(model), expected)
    drafted = [request_of(i) for i in range(2)]
    drafter = FakeDrafter(tree(0.8, 12), answers_of(expected))
    run(make_engine(model, drafter=drafter), drafted)
    for one, other in zip(drafted, expected, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, rel=0, abs=1e-5)


def test_a_turn_goes_on_from_what_is_left_of_the_one_before(model):
    stop = {*range(0, VOCABULARY, 2)}
    engine, request = make_engine(model, kv_capacity=10_000), request_of(0, stop=stop)
    request.keeps_cache = True
    run(engine, [request])
    assert 0 < engine._kept.num_tokens < LENGTH, "its beginning was given back"
    answered(request, 2)
    alone = copy.deepcopy(request)
    run(engine, [request])
    run(make_engine(model), [alone])
    assert request.tokens == alone.tokens
