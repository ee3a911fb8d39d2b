"""Drafts change nothing but the number of iterations."""

import functools

import pytest
import torch

from rhymeflow.engine.sequence import Segment
from tests.engine.drafters import DRAFTS, FakeDrafter, right
from tests.engine.models import make_engine, make_requests, run, sampling, tiny_model

LENGTHS = (3, 3, 17, 1, 40, 9, 225, 2, 2, 60)
HOWS = {
    "greedy": {"temperature": 0.0},
    "cool": {"temperature": 0.6},
    "plain": {},
    "nucleus": {"temperature": 1.0, "top_p": 0.8},
    "top-k": {"temperature": 1.2, "top_k": 7},
}
STOP = tuple(range(0, 150, 31))
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@functools.cache
def model_of(dtype):
    return tiny_model().to(DTYPES[dtype])


def requests_of(how):
    requests = make_requests(LENGTHS, sampling(max_new_tokens=43, **HOWS[how]))
    for i, request in enumerate(requests):
        if i % 2:
            request.sampling = sampling(max_new_tokens=43 - i, stop=STOP, **HOWS[how])
    return requests


@functools.cache
def undrafted(how, dtype):
    requests = requests_of(how)
    return requests, run(make_engine(model_of(dtype)), requests)


def answers_of(requests):
    return {(tuple(r.prompt_ids), r.noise_key.sample): r.tokens for r in requests}


def assert_same(requests, expected, tolerance=2e-5):
    for one, other in zip(requests, expected, strict=True):
        assert one.tokens == other.tokens
        assert one.segments == other.segments
        assert one.logprobs == pytest.approx(other.logprobs, abs=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("drafts", DRAFTS)
def test_drafted_equals_undrafted(drafts, how, dtype):
    expected, reasons = undrafted(how, dtype)
    requests, drafter = requests_of(how), FakeDrafter(DRAFTS[drafts], answers_of(expected))
    engine = make_engine(model_of(dtype), drafter=drafter, max_prefill_tokens=50)
    assert run(engine, requests) == reasons
    assert_same(requests, expected)
    assert not drafter.texts
    assert engine.kv_tokens == 0


@pytest.mark.parametrize("size", [1, 3, 7, 42])
def test_right_drafts_take_as_few_iterations_as_can_be(size):
    expected, _ = undrafted("plain", "float32")
    requests, drafter = requests_of("plain"), FakeDrafter(right(size), answers_of(expected))
    run(make_engine(model_of("float32"), drafter=drafter), requests)
    for request in requests:
        assert request.segments == [Segment(0, 0, "a")]
        # the first token comes with the prompt, unless the prompt was copied or is one token
        made = len(request.tokens)
        whole, rest = -(-made // (size + 1)), 1 + -(-(made - 1) // (size + 1))
        assert request.steps in (whole, rest)
