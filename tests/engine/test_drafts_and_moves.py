"""Drafted responses that are given new weights, against undrafted ones.

An undrafted response, alone in its engine, is given the weights at the very positions at which the
drafted one got them.
"""

import functools

import pytest
import torch

from tests.engine.drafters import DRAFTS, FakeDrafter
from tests.engine.exactness import (
    DTYPES,
    answers_of,
    assert_same,
    drafted,
    requests_of,
    undrafted,
)
from tests.engine.models import (
    make_engine,
    run,
    tiny_model,
)


@pytest.mark.parametrize("drafts", ["half right", "tree", "right tree"])
def test_on_cpus_log_probabilities_are_the_same_to_the_last_bit(drafts):
    """In float32; the shape of a draft is in no sum."""
    requests, _, _ = drafted(DRAFTS[drafts], "plain", "float32")
    for request, other in zip(requests, undrafted("plain", "float32")[0], strict=True):
        assert request.logprobs == other.logprobs


def with_pulls(model, request, pulls, *, keep_cache, versions):
    """Run one response alone; it sees `versions[v]` from position `place` on, for each pull."""
    engine = make_engine(model, max_prefill_tokens=512)
    model.load_state_dict(versions[0])
    engine.set_version(0, keep_cache=False)
    engine.submit(request)
    for version, place in pulls:
        while engine.has_work and len(request.tokens) < place:
            engine.step()
        assert len(request.tokens) == place
        model.load_state_dict(versions[version])
        engine.set_version(version, keep_cache=keep_cache)
    while engine.has_work:
        engine.step()


@functools.cache
def similar_versions(dtype, count=5):
    """Weights that change by little, as a policy's do: much of a response stays the same."""
    torch.manual_seed(3)
    versions = [tiny_model().to(DTYPES[dtype]).state_dict()]
    for _ in range(count - 1):
        versions.append({k: v * (1 + 0.01 * torch.randn_like(v)) for k, v in versions[-1].items()})
    return versions


@pytest.mark.parametrize("keep_cache", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_new_weights_for_many_that_are_drafted_from_old_ones(dtype, keep_cache):
    """Drafts are what version 0 would have said. Some arrive late, with prompts that are there."""
    model, versions = tiny_model().to(DTYPES[dtype]), similar_versions(dtype)
    answers = answers_of(undrafted("plain", dtype)[0])
    drafter = FakeDrafter(DRAFTS["right tree"], answers)
    engine = make_engine(model, max_num_seqs=16, max_prefill_tokens=512, drafter=drafter)
    requests = requests_of("plain")
    late = [request for request in requests if request.id in (1, 8)]
    for request in requests:
        if request not in late:
            engine.submit(request)
    pulls = {request.id: [] for request in requests}
    # one token more in each of the first iterations, so that all have begun before the first pull
    for version, steps in enumerate((3, 1, 2, 4), 1):
        for _ in range(steps):
            engine.step()
        model.load_state_dict(versions[version])
        engine.set_version(version, keep_cache=keep_cache)
        for request in requests:
            if request.finish_reason() is None:
                pulls[request.id].append((version, len(request.tokens)))
        if version == 1:
            for request in late:
                engine.submit(request)
    run(engine, [])
    expected = requests_of("plain")
    for other in expected:
        with_pulls(model, other, pulls[other.id], keep_cache=keep_cache, versions=versions)
    assert_same(requests, expected)
    assert sum(len(request.segments) for request in requests) > 2 * len(requests)
    assert sum(r.steps for r in requests) < 0.8 * sum(len(r.tokens) for r in requests)
    old = [answers[tuple(r.prompt_ids), r.noise_key.sample] for r in requests]
    assert [request.tokens for request in requests] != old
