"""vLLM with the demo's model in float32: token by token what the native engine generates."""

import itertools
import random
from dataclasses import replace

import pytest

from rhymeflow.data.text import StopTexts
from rhymeflow.engine.base import NoiseKey, Request, Sampling
from rhymeflow.engine.vllm import sampler
from rhymeflow.errors import UserError
from rhymeflow.histospec.index import Index
from rhymeflow.models.tokenizer import load_tokenizer
from tests.engine.models import converse
from tests.vllm.sameness import (
    Knowing,
    answers_of,
    assert_same,
    closing_rig,
    drain,
    needs_vllm,
    requests_of,
)

pytestmark = [needs_vllm, pytest.mark.vllm]

NUM_TOKENS = 60
STOP = (1, 20, 37)
TOLERANCE = 2e-4  # of log-probabilities: other kernels sum in another order


@pytest.fixture(scope="module")
def rig():
    with closing_rig("demo", "float32") as rig:
        yield rig


@pytest.fixture(scope="module")
def vllm(rig):
    engine = rig.engine("vllm")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def native(rig):
    return rig.engine("native")


@pytest.fixture(scope="module")
def expected(rig, native):
    requests = requests_of(rig, NUM_TOKENS, stop=STOP)
    return requests, drain(native, requests)


def fresh(rig):
    return requests_of(rig, NUM_TOKENS, stop=STOP)


@pytest.fixture
def drafted(rig, vllm, expected):
    """vLLM with a drafter that is mostly right."""
    vllm.draft_with(Knowing(answers_of(expected[0]), rig.vocabulary, most=9, right=0.85))
    yield vllm
    vllm.interrupt()
    vllm.draft_with(None)


def test_same_tokens_as_the_native_engine(rig, vllm, expected):
    assert (vllm.version, vllm.checksum) == (0, rig.checksums[0])
    requests = fresh(rig)
    assert drain(vllm, requests) == expected[1]
    assert_same(requests, expected[0], TOLERANCE)
    assert {"stop", "length"} == set(expected[1].values())


def test_urgent_requests_take_half_the_places_at_once(rig, drafted, expected):
    """And those that made way come back with the tokens they would have had."""
    requests = fresh(rig) + [
        copied(request, f"more {i}") for i in range(3) for request in fresh(rig)
    ]
    places = rig.config.rollout.max_num_seqs
    for request in requests:
        drafted.submit(request)
    ended = [request.id for _ in range(2) for request, _ in drafted.poll(0.0)]
    assert drafted.load().num_running == places
    urgent = [copied(request, f"urgent {i}") for i in range(2) for request in fresh(rig)]
    for request in urgent:
        request.is_urgent = True
        drafted.submit(request)
    ended += [request.id for request, _ in drafted.poll(0.0)]
    assert drafted.load().num_running <= places
    waiting = set(drafted.load().waiting)
    assert sum(request.id not in waiting for request in urgent) == places // 2
    assert drafted.interrupt([urgent[-1].id]) == [urgent.pop()]
    while drafted.has_work:
        ended += [request.id for request, _ in drafted.poll(0.0)]
    assert sorted(map(str, ended)) == sorted(str(request.id) for request in (*requests, *urgent))
    last_urgent = max(ended.index(request.id) for request in urgent)
    assert last_urgent < len(ended) - places // 2, "the urgent ones waited for the others"
    for i, request in enumerate([*requests, *urgent]):
        assert_same([request], [expected[0][i % len(expected[0])]], TOLERANCE)


def copied(request, name):
    """The same request under another id."""
    return Request((request.id, name), request.prompt_ids, request.noise_key, request.sampling)


def conversations(rig, engine):
    requests = requests_of(rig, 2 * NUM_TOKENS, stop=STOP)
    converse(engine, lambda: engine.poll(0.01), requests, 3)
    return requests


def test_turns_are_those_of_the_native_engine(rig, vllm, native):
    found, expected = conversations(rig, vllm), conversations(rig, native)
    assert_same(found, expected, TOLERANCE)
    assert any(len(request.tokens) > request.turn_start > 0 for request in found)


def test_same_tokens_with_drafts(rig, drafted, expected):
    requests = fresh(rig)
    for request in requests:
        request.accepted = bytearray()
    reasons = drain(drafted, requests)
    assert_same(requests, expected[0], TOLERANCE)
    assert reasons == expected[1]
    for request in requests:
        assert request.drafted >= sum(request.accepted)
        assert len(request.accepted) == len(request.tokens)
        assert request.steps + sum(request.accepted) == len(request.tokens)
    assert sum(sum(request.accepted) for request in requests) > 100


def test_texts_end_a_turn_whose_drafts_go_on(rig, drafted, expected):
    requests, decode = fresh(rig), load_tokenizer(rig.config.model).decode
    due = [replace(each) for each in expected[0]]
    for request, whole in zip(requests, due, strict=True):
        place = len(whole.tokens) // 2
        texts = (decode(whole.tokens[place : place + 2]) or "0",)
        request.stop_texts = StopTexts(decode, texts)
        lengths = range(1, len(whole.tokens) + 1)
        end = next((n for n in lengths if texts[0] in decode(whole.tokens[:n])), None)
        whole.tokens, whole.logprobs = whole.tokens[:end], whole.logprobs[:end]
    drain(drafted, requests)
    assert_same(requests, due, TOLERANCE)
    assert sum(request.drafted for request in requests) > 10


def test_draws_without_room_are_repeated(rig, drafted, expected, monkeypatch):
    """As the second runner says it, in whose place the first one does here."""
    verify, calls = sampler.verify, itertools.count()

    def without_room(*given):
        tokens, logprobs = verify(*given)
        first = {5: 1, 15: 0}.get(next(calls))  # of each request's rows
        if first is not None:
            tokens[:, first:].clamp_(max=0)
            logprobs[:, first:] = sampler.UNKNOWN_LOGPROB
        return tokens, logprobs

    monkeypatch.setattr(sampler, "verify", without_room)
    requests = fresh(rig)
    for request in requests:
        request.accepted = bytearray()
    assert drain(drafted, requests) == expected[1]
    assert_same(requests, expected[0], TOLERANCE)
    for request in requests:
        assert request.steps + sum(request.accepted) == len(request.tokens)
    assert next(calls) > 15


def test_same_tokens_if_moved_between_vllm_and_the_native_engine(rig, drafted, native, expected):
    requests = fresh(rig)
    rng = random.Random(1)
    at = {request.id: rng.choice((drafted, native)) for request in requests}
    for request in requests:
        at[request.id].submit(request)
    for step in itertools.count():
        reasons = [r for engine in (drafted, native) for r in engine.poll(0.0)]
        for request, _ in reasons:
            del at[request.id]
        if not at:
            break
        if step % 5 == 4:
            key = rng.choice(list(at))
            for request in at[key].interrupt([key]):
                at[key] = rng.choice((drafted, native))
                at[key].submit(request)
    assert_same(requests, expected[0], TOLERANCE)
    assert any(len(request.segments) > 1 for request in requests)


def test_history_drafts_for_the_request_it_knows(rig, vllm, expected):
    """A later epoch of the same prompts with the same noise: nearly everything is accepted."""
    index = Index(max_tokens=20_000, max_responses=64, shared=True)
    try:
        for request in expected[0]:
            _, epoch, sample = request.noise_key
            number = index.begin(request.prompt_ids, sample=sample, noise_epoch=epoch)
            index.extend(number, request.tokens)
            index.finish(number, 1.0)
        vllm.draft_with(rig.drafter(index.handle, vllm.limits()))
        for _ in range(6):  # the first iterations measure without drafts
            requests = fresh(rig)
            drain(vllm, requests)
            assert_same(requests, expected[0], TOLERANCE)
        stats = vllm.load().drafts
        assert stats.accepted > 0.5 * stats.drafted > 20
    finally:
        vllm.draft_with(None)
        index.close()


def unfinished_after_nine(engine, requests):
    """Run each to nine tokens, and return those that did not end before."""
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.poll(0.0)
        engine.interrupt([r.id for r in requests if len(r.tokens) >= 9])
    return [request for request in requests if request.finish_reason() is None]


@pytest.mark.parametrize("version", [1, 2])
def test_weights_that_come_under_running_requests(rig, vllm, native, version):
    """Both engines change weights after the same tokens, and go on alike. Where keys and values are
    kept, one that runs goes on with its own; what comes later, with the same prompt, gets none."""
    keep_cache = version == 2
    rig.publish(version, 0.02)
    made = []
    for engine in (native, vllm):
        requests = fresh(rig)[:6]
        prompt = requests[4].prompt_ids
        late = unfinished_after_nine(engine, requests)
        old, new = (Request(n, list(prompt), NoiseKey(9, 9, n), plain(40)) for n in (98, 99))
        made.append([*requests, old, new])
        engine.submit(old)
        while len(old.tokens) < 12:
            engine.poll(0.0)
        assert engine.load().num_running > 0
        pulled = engine.install(rig.store.handle.open(), version, keep_cache=keep_cache)
        assert pulled == (version, rig.checksums[version])
        drain(engine, [*late, new])
        assert [segment.start for segment in old.segments] == [0, 12]
        assert [segment.version for segment in new.segments] == [version]
    assert_same(made[1], made[0], TOLERANCE)


def plain(num_tokens):
    return Sampling(1.0, 1.0, 0, num_tokens, frozenset())


def test_it_says_how_it_is_and_refuses_what_it_cannot_hold(rig, vllm):
    before = vllm.load()
    assert (before.num_running, before.waiting, before.kv_tokens) == (0, (), 0)
    requests = [Request(i, [5 + i] * 9, NoiseKey(i, 0, 0), plain(6)) for i in range(20)]
    for request in requests:
        vllm.submit(request)
    assert len(vllm.load().waiting) == 20
    vllm.poll(0.0)
    load = vllm.load()
    assert (load.num_running, len(load.waiting)) == (16, 4)
    assert load.kv_tokens >= 16 * 9
    with pytest.raises(UserError, match="768"):
        vllm.submit(Request("long", [5] * 700, NoiseKey(0, 0, 0), plain(100)))
    assert vllm.interrupt(["long", 3]) == [requests[3]]
    drain(vllm)
    assert vllm.load().num_generated == before.num_generated + 19 * 6 + len(requests[3].tokens)
    assert vllm.limits().max_length == 768
    assert vllm.limits().kv_capacity > 16 * 768
    assert vllm.poll(0.0) == []
