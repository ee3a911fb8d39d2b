"""The engine equals the slow oracle, and a response is the same however it came about."""

import pytest
import torch
from transformers import DynamicCache

from rhymeflow.engine.native import noise
from rhymeflow.errors import UserError
from tests.engine.drafters import FakeDrafter, answers_of, right, tree
from tests.engine.models import (
    HOWS,
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


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


def generated_by(model, lengths=LENGTHS, how=None, **options):
    requests = make_requests(lengths, how)
    run(make_engine(model, **options), requests)
    return requests


@pytest.mark.parametrize("how", HOWS)
def test_equals_the_plain_model_recomputed_token_by_token(kind, how):
    plain = tiny_model(kind, "eager" if "top_k" in HOWS[how] else "sdpa")
    requests = make_requests(LENGTHS, sampling(**HOWS[how]))
    reasons = run(make_engine(tiny_model(kind)), requests)
    for request in requests:
        tokens, logprobs, reason = oracle(plain, request)
        assert request.tokens == tokens
        assert request.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert reasons[request.id] == reason


def test_prompts_that_begin_alike_share_what_they_begin_with(kind, monkeypatch):
    requests = make_requests((70, 75, 40, 80))
    for each in (requests[1], requests[3]):
        each.prompt_ids[:64] = requests[0].prompt_ids[:64]
    engine, copied = make_engine(tiny_model(kind)), []
    whole = engine._cache.copied

    def noted(source, slot, length):
        copied.append(length)
        return whole(source, slot, length)

    monkeypatch.setattr(engine._cache, "copied", noted)
    run(engine, requests)
    assert copied == [64, 64]
    for request in requests:
        tokens, logprobs, _ = oracle(tiny_model(kind, "sdpa"), request)
        assert request.tokens == tokens
        assert request.logprobs == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("drafts", [right(0), tree(0.8, 24)], ids=["none", "trees"])
@pytest.mark.parametrize("keep_cache", [True, False])
@pytest.mark.parametrize("steps", [2, 9])
def test_new_weights_with_and_without_the_old_cache(kind, steps, keep_cache, drafts):
    """The direct formula: the old model's keys and values up to the change, the new model's after.
    After two steps the longest prompt is still being prefilled. New weights differ by little, so
    that much of a response stays the same, and drafts are what the old ones would have said."""
    model, old = tiny_model(kind), tiny_model(kind, "sdpa")
    new = tiny_model(kind, "sdpa")
    torch.manual_seed(3)
    for each in new.parameters():
        each.data *= 1 + 0.01 * torch.randn_like(each)
    drafter = FakeDrafter(drafts, answers_of(generated_by(model)))
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
def test_on_cuda_everything_is_the_same():
    model, how = tiny_model().to("cuda"), sampling(max_new_tokens=8)
    batch, alone = generated_by(model, how=how), generated_by(model, how=how, max_num_seqs=1)
    chunked = generated_by(model, how=how, max_prefill_tokens=5)
    plain = tiny_model("llama", "sdpa").to("cuda")
    for one, other, third in zip(batch, alone, chunked, strict=True):
        assert one.tokens == other.tokens == third.tokens
        tokens, logprobs, _ = oracle(plain, one)
        assert one.tokens == tokens
        assert one.logprobs == pytest.approx(logprobs, abs=1e-4)
    # bfloat16: rounding decides, so only that it runs and that probabilities are sensible
    for request in generated_by(model.bfloat16(), how=how):
        assert max(request.logprobs) <= 0


def test_new_weights_while_something_has_made_way_for_urgent_ones():
    """What is cached of it is computed anew with the rest."""
    model, new = tiny_model(), tiny_model(implementation="sdpa", seed=1)
    requests = make_requests((4, 4, 20, 7, 5, 6))
    engine = make_engine(model, max_num_seqs=4, kv_capacity=100_000)
    for request in requests[:4]:
        engine.submit(request)
    for _ in range(6):
        engine.step()
    for request in requests[4:]:
        request.is_urgent = True
        engine.submit(request)
    engine.step()
    assert engine.load().waiting == (2, 3)
    model.load_state_dict(new.state_dict())
    engine.set_version(1, keep_cache=False)
    assert engine.kv_tokens == 0
    run(engine, [])
    for request in requests:
        begin = request.segments[-1].start
        _, logprobs = by_formula(model, new, request, 0)
        assert request.logprobs[begin:] == pytest.approx(logprobs[begin:], abs=1e-4)


def test_what_makes_way_before_it_has_begun():
    """The first grows while the second is prefilled, in parts, and the third has no turn yet."""
    model = tiny_model()
    engine = make_engine(model, max_prefill_tokens=4, kv_capacity=22)
    requests = make_requests((3, 12, 5))
    for request in requests:
        engine.submit(request)
    for _ in range(3):
        engine.step()
        assert len(engine.load().waiting) == 0
    engine.step()
    assert engine.load().waiting == (requests[2].id,)
    assert engine.kv_tokens <= 22
    while engine.has_work:
        engine.step()
    alone = make_requests((3, 12, 5))
    run(make_engine(model), alone)
    assert [each.tokens for each in requests] == [each.tokens for each in alone]
