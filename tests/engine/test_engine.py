"""The engine equals the slow oracle, and a response is the same however it came about."""

import pytest
import torch
from transformers import DynamicCache

from rhymeflow.engine.native import noise
from rhymeflow.errors import UserError
from tests.engine.drafters import DRAFTS, FakeDrafter, right
from tests.engine.exactness import answers_of, assert_same
from tests.engine.models import (
    SEED,
    make_engine,
    make_requests,
    oracle,
    run,
    sampling,
    tiny_model,
)

KINDS = ("llama", "qwen2")
LENGTHS = (3, 3, 17, 1, 40, 9, 245, 2)
"""The longest outgrows its first size class of the cache (256 tokens) while it runs."""

HOWS = {
    "plain": sampling(),
    "warm": sampling(temperature=1.4),
    "nucleus": sampling(temperature=0.8, top_p=0.9),
    "top-k": sampling(top_k=5),
    "both": sampling(temperature=1.2, top_p=0.7, top_k=20),
    "greedy": sampling(temperature=0.0),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


def generated_by(model, lengths=LENGTHS, how=None, **options):
    requests = make_requests(lengths, how)
    run(make_engine(model, **options), requests)
    return requests


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS.keys())
def test_equals_the_plain_model_recomputed_token_by_token(kind, how):
    plain = tiny_model(kind, "eager" if how.top_k else "sdpa")
    requests = make_requests(LENGTHS, how)
    reasons = run(make_engine(tiny_model(kind)), requests)
    for request in requests:
        tokens, logprobs, reason = oracle(plain, request)
        assert request.tokens == tokens
        assert request.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert reasons[request.id] == reason


@pytest.mark.parametrize("drafts", ["none", "right tree"])
@pytest.mark.parametrize("keep_cache", [True, False])
@pytest.mark.parametrize("steps", [2, 9])
def test_new_weights_with_and_without_the_old_cache(kind, steps, keep_cache, drafts):
    """The direct formula: the old model's keys and values up to the change, the new model's after.

    After two steps the longest prompt is still being prefilled. Drafts are what the old weights
    would have said.
    """
    model, old = tiny_model(kind), tiny_model(kind, "sdpa")
    new = tiny_model(kind, "sdpa", seed=1 if drafts == "none" else 0)
    if drafts != "none":  # by little, so that much of a response stays the same
        torch.manual_seed(3)
        for each in new.parameters():
            each.data *= 1 + 0.01 * torch.randn_like(each)
    drafter = FakeDrafter(DRAFTS[drafts], answers_of(generated_by(model)))
    requests, engine = make_requests(LENGTHS), make_engine(model, drafter=drafter)
    for request in requests:
        engine.submit(request)
    for _ in range(steps):
        engine.step()
    cached = {s.request.id: s.cached * keep_cache for s in engine._scheduler.running}
    if keep_cache:
        assert any(0 < cached.get(r.id, 0) < len(r.prompt_ids) for r in requests) == (steps == 2)
    before = [list(request.tokens) for request in requests]
    model.load_state_dict(new.state_dict())
    engine.set_version(3, keep_cache=keep_cache)
    assert sum(cached.values()) == engine.kv_tokens
    [late] = make_requests([LENGTHS[0]])  # shares a prompt, but nothing that is out of date
    late.id = "late"
    run(engine, [late])
    for request, generated in zip([*requests, late], [*before, []], strict=True):
        begin = len(generated)
        assert request.tokens[:begin] == generated
        assert [s.version for s in request.segments] == ([0, 3] if generated else [3])[
            : 1 + (begin < len(request.tokens))
        ]
        tokens, logprobs = by_formula(old, new, request, cached.get(request.id, 0))
        assert request.tokens[begin:] == tokens[begin:]
        assert request.logprobs[begin:] == pytest.approx(logprobs[begin:], abs=1e-4)
    assert late.logprobs != pytest.approx(by_formula(old, new, late, 2)[1], abs=1e-6)


def by_formula(old, new, request, cached):
    """Each response token as it is drawn after those before it, and its log-probability, with the
    first `cached` positions' keys and values by `old`."""
    ids = torch.tensor([request.prompt_ids + request.tokens])
    cache, logits = DynamicCache(), []
    with torch.no_grad():
        if cached:
            logits.append(old(ids[:, :cached], past_key_values=cache).logits[0])
        logits.append(new(ids[:, cached:], past_key_values=cache).logits[0])
    rows = torch.cat(logits)[len(request.prompt_ids) - 1 : -1].log_softmax(1)
    streams = [noise.stream(SEED, request.noise_key)] * len(rows)
    keys = noise.row_keys(streams, range(len(rows)), torch.device("cpu"))
    drawn = noise.draw(rows, keys).tolist()
    return drawn, rows.gather(1, torch.tensor(request.tokens)[:, None])[:, 0].tolist()


def test_a_full_model_length_is_served_and_one_more_refused():
    engine = make_engine(tiny_model())
    run(engine, make_requests([264], sampling(max_new_tokens=56)))
    with pytest.raises(UserError, match=r"264 prompt tokens and up to 57 new ones.* = 320"):
        engine.submit(make_requests([264], sampling(max_new_tokens=57))[0])
    with pytest.raises(UserError, match="the prompt is empty"):
        engine.submit(make_requests([0])[0])


def test_one_prompt_of_many_is_computed_once(monkeypatch):
    engine, rows = make_engine(tiny_model(), max_prefill_tokens=512), []
    plain = engine._body.run

    def counted(ids, positions, how):
        rows.append(len(ids))
        return plain(ids, positions, how)

    monkeypatch.setattr(engine._body, "run", counted)
    requests = make_requests([40] * 6, sampling(max_new_tokens=8))
    run(engine, requests)
    # 40 prompt tokens once; of the five others the last prompt token; then what was sampled,
    # all but the last token of each.
    assert sum(rows) == 40 + 5 + 6 * 7
    assert len({tuple(request.tokens) for request in requests}) == 6


def test_counts():
    engine = make_engine(tiny_model(), max_num_seqs=2)

    def counts():
        load = engine.load()
        return load.num_running, len(load.waiting), load.kv_tokens

    requests = make_requests([5, 6, 7], sampling(max_new_tokens=4))
    for request in requests:
        engine.submit(request)
    assert counts() == (0, 3, 0)
    engine.step()
    assert counts() == (2, 1, 11)
    assert engine.load().waiting == (2,)
    assert engine.interrupt() == requests
    assert counts() == (0, 0, 0)
    assert not engine.has_work
    run(engine, requests[::-1])
    assert counts() == (0, 0, 0)
    assert engine.load().num_generated == 12
    assert engine.step() == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_everything_is_the_same():
    model = tiny_model().to("cuda")
    batch, alone = generated_by(model), generated_by(model, max_num_seqs=1)
    chunked = generated_by(model, max_prefill_tokens=5)
    plain = tiny_model("llama", "sdpa").to("cuda")
    for one, other, third in zip(batch, alone, chunked, strict=True):
        assert one.tokens == other.tokens == third.tokens
        tokens, logprobs, _ = oracle(plain, one)
        assert one.tokens == tokens
        assert one.logprobs == pytest.approx(logprobs, abs=1e-4)
    # bfloat16: rounding decides, so only that it runs and that probabilities are sensible
    for request in generated_by(model.bfloat16()):
        assert max(request.logprobs) <= 0


def with_urgent(model, *, is_urgent=True, kv_capacity=None, drafter=None):
    """An engine with four places, all taken when two urgent requests came; all requests."""
    requests = make_requests((4, 4, 20, 7, 5, 6))
    engine = make_engine(model, max_num_seqs=4, kv_capacity=kv_capacity, drafter=drafter)
    for request in requests[:4]:
        engine.submit(request)
    for _ in range(3 if drafter else 6):
        engine.step()
    for request in requests[4:]:
        request.is_urgent = is_urgent
        engine.submit(request)
    engine.step()
    return engine, requests


@pytest.mark.parametrize("capacity", [None, 30, 100_000], ids=["lost", "some", "kept"])
def test_what_makes_way_for_urgent_ones_goes_on_as_if_nothing_had_happened(capacity):
    model = tiny_model()
    engine, requests = with_urgent(model, kv_capacity=capacity)
    assert engine.load().waiting == (2, 3)
    other, expected = with_urgent(model, is_urgent=False)
    assert other.load().waiting == (4, 5)
    run(engine, [])
    run(other, [])
    assert_same(requests, expected)
    drafter = FakeDrafter(right(1), answers_of(expected), places=4)
    engine, requests = with_urgent(model, kv_capacity=capacity, drafter=drafter)
    assert engine.load().waiting == (2, 3)
    assert len(drafter.texts) <= 2, "those that wait have none"
    run(engine, [])
    assert_same(requests, expected)


def test_new_weights_while_something_has_made_way():
    """What is cached of it is computed anew with the rest."""
    model, new = tiny_model(), tiny_model(implementation="sdpa", seed=1)
    engine, requests = with_urgent(model, kv_capacity=100_000)
    model.load_state_dict(new.state_dict())
    engine.set_version(1, keep_cache=False)
    assert engine.kv_tokens == 0
    run(engine, [])
    for request in requests:
        begin = request.segments[-1].start
        _, logprobs = by_formula(model, new, request, 0)
        assert request.logprobs[begin:] == pytest.approx(logprobs[begin:], abs=1e-4)
