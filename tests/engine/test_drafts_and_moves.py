"""Drafted responses that are interrupted, moved or given new weights, against undrafted ones.

An undrafted response, alone in its engine, is given the weights at the very positions at which the
drafted one got them.
"""

import functools
import itertools

import pytest
import torch

from rhymeflow.engine.base import Segment
from tests.engine.drafters import DRAFTS, FakeDrafter
from tests.engine.exactness import (
    DTYPES,
    answers_of,
    assert_same,
    drafted,
    model_of,
    requests_of,
    undrafted,
)
from tests.engine.models import (
    make_engine,
    make_requests,
    run,
    sampling,
    tiny_model,
)


@pytest.mark.parametrize("drafts", ["half right", "tree", "right tree"])
def test_on_cpus_log_probabilities_are_the_same_to_the_last_bit(drafts):
    """In float32; the shape of a draft is in no sum."""
    requests, _, _ = drafted(DRAFTS[drafts], "plain", "float32")
    for request, other in zip(requests, undrafted("plain", "float32")[0], strict=True):
        assert request.logprobs == other.logprobs


def with_pulls(model, request, pulls, *, keep_cache, versions, drafter=None):
    """Run one response alone; it sees `versions[v]` from position `place` on, for each pull."""
    engine = make_engine(model, drafter=drafter, max_prefill_tokens=512)
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


def up_to(pulls, draft):
    """The draft with right tokens up to the next pull only, so that it is not passed by."""

    def capped(answer, at, room, rng):
        nearest = min((place for _, place in pulls if place > at), default=len(answer) + 1)
        return draft(answer[: nearest - 1], at, room, rng)

    return capped


@functools.cache
def versions_of(dtype, count=5):
    """Quite different weights."""
    return [tiny_model(seed=seed).to(DTYPES[dtype]).state_dict() for seed in range(count)]


@functools.cache
def similar_versions(dtype, count=5):
    """Weights that change by little, as a policy's do: much of a response stays the same."""
    torch.manual_seed(3)
    versions = [dict(versions_of(dtype)[0])]
    for _ in range(count - 1):
        versions.append({k: v * (1 + 0.01 * torch.randn_like(v)) for k, v in versions[-1].items()})
    return versions


@pytest.mark.parametrize("keep_cache", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("drafts", ["right", "half right", "right tree"])
def test_new_weights_at_the_same_positions(drafts, dtype, keep_cache):
    """Drafts that are right under whatever weights are there; one pull follows on another."""
    pulls = [(1, 5), (2, 6), (3, 19), (4, 30)]
    model, versions = tiny_model().to(DTYPES[dtype]), versions_of(dtype)
    for request in make_requests((17, 2), sampling(max_new_tokens=43)):
        [other] = make_requests([len(request.prompt_ids)], request.sampling)
        other.id, other.noise_key = request.id, request.noise_key
        options = {"keep_cache": keep_cache, "versions": versions}
        with_pulls(model, other, pulls, **options)
        assert [(s.version, s.start) for s in other.segments] == [(0, 0), *pulls]
        drafter = FakeDrafter(up_to(pulls, DRAFTS[drafts]), answers_of([other]))
        with_pulls(model, request, pulls, drafter=drafter, **options)
        assert_same([request], [other])
        assert request.steps < 38


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


@pytest.mark.parametrize("keep_cache", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("drafts", ["half right", "right tree"])
def test_a_pull_of_the_same_weights_changes_the_version_only(drafts, dtype, keep_cache):
    expected, reasons = undrafted("plain", dtype)
    drafter = FakeDrafter(DRAFTS[drafts], answers_of(expected))
    engine = make_engine(model_of(dtype), drafter=drafter, max_prefill_tokens=1024)
    requests, found, lengths = requests_of("plain"), {}, {}
    for request in requests:
        engine.submit(request)
    iteration = 0
    while engine.has_work:
        for request in requests:
            lengths.setdefault(request.id, []).append(len(request.tokens))
        found.update({request.id: reason for request, reason in engine.step()})
        iteration += 1
        if iteration % 3 == 0:
            engine.set_version(iteration // 3, keep_cache=keep_cache)
    assert found == reasons
    for request, other in zip(requests, expected, strict=True):
        assert request.tokens == other.tokens
        assert request.logprobs == pytest.approx(other.logprobs, abs=2e-5)
        steps = list(itertools.pairwise([*lengths[request.id], len(request.tokens)]))
        assert request.steps == sum(end > start for start, end in steps)
        generated = {
            i // 3: start for i, (start, end) in reversed([*enumerate(steps)]) if end > start
        }
        assert request.segments == [Segment(generated[v], v, "a") for v in sorted(generated)]
