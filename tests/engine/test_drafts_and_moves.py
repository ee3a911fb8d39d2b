"""Drafted responses that are interrupted, moved or given new weights, against undrafted ones.

An undrafted response, alone in its engine, is given the weights at the very positions at which the
drafted one got them.
"""

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.engine.sequence import Request, Segment
from rhymeflow.histospec.draft import Draft
from tests.engine.drafters import DRAFTS, FakeDrafter
from tests.engine.exactness import (
    DTYPES,
    HOWS,
    answers_of,
    assert_same,
    model_of,
    requests_of,
    undrafted,
)
from tests.engine.models import (
    VOCABULARY,
    make_engine,
    make_requests,
    run,
    sampling,
    tiny_model,
)

MIXED = ("half right", "right tree", "too long")


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
        """By the direct rule: a segment where a stay elsewhere made something."""
        stays = [*self.stays[request.id], (len(request.tokens), None)]
        made = [
            (start, name) for (start, name), (end, _) in itertools.pairwise(stays) if end > start
        ]
        found = [Segment(start, 0, name) for start, name in made]
        same = [i for i in range(1, len(found)) if found[i].instance == found[i - 1].instance]
        return [segment for i, segment in enumerate(found) if i not in same]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("drafts", MIXED[:2])
def test_interrupted_again_and_again(drafts, dtype):
    """Half of them every few iterations; by turns they go on where they were and elsewhere."""
    expected, reasons = undrafted("plain", dtype)
    moves = Moves(model_of(dtype), DRAFTS[drafts], answers_of(expected), max_prefill_tokens=130)
    requests = requests_of("plain")
    for request in requests:
        moves.submit(request, "ab"[request.id % 2])
    for turn in range(9):
        for _ in range(2):
            moves.step()
        chosen = [request.id for request in requests if (request.id + turn) % 2]
        moves.move([(key, (key + turn) % 3 == 0) for key in chosen])
    assert moves.finish() == reasons
    for request, other in zip(requests, expected, strict=True):
        assert request.tokens == other.tokens
        assert request.logprobs == pytest.approx(other.logprobs, abs=2e-5)
        assert request.segments == moves.segments(request)
    assert max(len(request.segments) for request in requests) > 1
    assert sum(r.steps for r in requests) < 0.8 * sum(len(r.tokens) for r in requests)


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
@pytest.mark.parametrize("drafts", ["right", *MIXED[:2]])
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
@pytest.mark.parametrize("drafts", ["right", "right tree"])
def test_new_weights_for_many_that_are_drafted_from_old_ones(drafts, dtype, keep_cache):
    """Drafts are what version 0 would have said. Some arrive late, with prompts that are there."""
    model, versions = tiny_model().to(DTYPES[dtype]), similar_versions(dtype)
    answers = answers_of(undrafted("plain", dtype)[0])
    drafter = FakeDrafter(DRAFTS[drafts], answers)
    engine = make_engine(model, max_running=16, max_prefill_tokens=512, drafter=drafter)
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
@pytest.mark.parametrize("drafts", MIXED)
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
        made = {i // 3: start for i, (start, end) in reversed([*enumerate(steps)]) if end > start}
        assert request.segments == [Segment(made[v], v, "a") for v in sorted(made)]


# Any drafts, any requests, any interruptions. A proposal is a list of (which parent, what token):
# parents by their distance back, tokens right for their depth, wrong or in no vocabulary.

LONGEST = 24
POOL = (3, 3, 17, 1, 9, 40)
nodes = st.tuples(st.integers(0, 3), st.sampled_from(["right", "wrong", "none", "below none"]))
proposals = st.lists(nodes, max_size=12)
scripts = st.lists(proposals, min_size=1, max_size=5)
wanted = st.tuples(
    st.integers(0, len(POOL) - 1),
    st.sampled_from(sorted(HOWS)),
    st.integers(1, LONGEST),
    st.sets(st.integers(0, LONGEST - 1), max_size=2),
)
moves_made = st.lists(
    st.tuples(st.integers(0, 4), st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=4)),
    max_size=6,
)


@functools.cache
def whole_answers(how):
    """Each request of the pool to the greatest length, undrafted."""
    requests = make_requests(POOL, sampling(max_new_tokens=LONGEST, **HOWS[how]))
    run(make_engine(model_of("float32")), requests)
    return requests


def scripted(scripts):
    """The proposals in turn, whichever responses ask."""
    turns = itertools.cycle(scripts)

    def draft(answer, at, room, rng):
        made, depth = Draft([], []), {-1: 0}
        for node, (back, kind) in enumerate(next(turns)):
            parent = max(-1, node - 1 - back)
            depth[node] = depth[parent] + 1
            place = at + depth[node] - 1
            known = answer[place] if place < len(answer) else 0
            token = {"right": known, "wrong": (known + 1 + node) % VOCABULARY}
            made.tokens.append(token.get(kind, VOCABULARY if kind == "none" else -1))
            made.parents.append(parent)
        return made

    return draft


@settings(max_examples=40, deadline=None)
@given(scripts, st.lists(wanted, min_size=1, max_size=6, unique_by=lambda w: w[0]), moves_made)
def test_any_drafts_any_requests_any_moves(scripts, mix, made):
    requests, expected = [], {}
    for which, how, most, stops in mix:
        whole = whole_answers(how)[which]
        stop = {whole.tokens[place] for place in stops}
        ends = [place + 1 for place, token in enumerate(whole.tokens) if token in stop]
        end = min([most, *ends])
        expected[which] = (whole.tokens[:end], "stop" if end in ends else "length")
        options = sampling(max_new_tokens=most, stop=stop, **HOWS[how])
        requests.append(Request(which, whole.prompt_ids, whole.noise_key, options))
    answers = {}
    for request, (_, how, *_rest) in zip(requests, mix, strict=True):
        whole = whole_answers(how)[request.id]
        answers[tuple(whole.prompt_ids), whole.noise_key.sample] = whole.tokens
    moves = Moves(model_of("float32"), scripted(scripts), answers, max_prefill_tokens=11)
    for request in requests:
        moves.submit(request, "a")
    for steps, chosen in made:
        for _ in range(steps):
            moves.step()
        present = {request.id for request in requests}
        moves.move([(key, is_elsewhere) for key, is_elsewhere in chosen if key in present])
    reasons = moves.finish()
    for request in requests:
        assert (request.tokens, reasons[request.id]) == expected[request.id]
        assert request.segments == moves.segments(request)
        assert len(request.logprobs) == len(request.tokens)
