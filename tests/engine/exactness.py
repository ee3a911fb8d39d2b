"""The comparison that the tests of drafts share: the same requests, drafted and not."""

import functools

import pytest
import torch

from tests.engine.drafters import FakeDrafter
from tests.engine.models import make_engine, make_requests, run, sampling, tiny_model

LENGTHS = (3, 3, 17, 1, 40, 9, 225, 2, 2, 60)
"""Two prompts come twice, one is a single token, and the longest outgrows its first size class."""

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
    """What an engine without drafts makes of `requests_of(how)`, and the reasons."""
    requests = requests_of(how)
    return requests, run(make_engine(model_of(dtype)), requests)


def answers_of(requests):
    return {(tuple(r.prompt_ids), r.noise_key.sample): list(r.tokens) for r in requests}


def drafted(draft, how, dtype, **options):
    """The same with drafts by someone who knows the answers; also returns the drafter."""
    requests = requests_of(how)
    drafter = FakeDrafter(draft, answers_of(undrafted(how, dtype)[0]))
    reasons = run(make_engine(model_of(dtype), drafter=drafter, **options), requests)
    return requests, reasons, drafter


def assert_same(requests, expected, tolerance=2e-5):
    """A tolerance of 0 is to the last bit."""
    for one, other in zip(requests, expected, strict=True):
        assert one.tokens == other.tokens
        assert one.segments == other.segments
        assert one.logprobs == pytest.approx(other.logprobs, rel=0, abs=tolerance)
