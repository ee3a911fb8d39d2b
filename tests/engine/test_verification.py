"""Drafts change nothing but the number of iterations, and that is known exactly."""

import functools

import pytest
import torch

from rhymeflow.engine.base import Segment
from tests.engine.drafters import FakeDrafter, answers_of, assert_same, line, noisy, right, tree
from tests.engine.models import make_engine, make_requests, run, sampling, tiny_model

LENGTHS = (3, 3, 17, 1, 40, 9, 225, 2, 2, 60)
"""Two prompts come twice, one is a single token, and the longest outgrows its first size class."""
MODEL = tiny_model()
STOP = tuple(range(0, 150, 31))


def requests_of():
    requests = make_requests(LENGTHS, sampling(max_new_tokens=43))
    for i, request in enumerate(requests):
        if i % 2:
            request.sampling = sampling(max_new_tokens=43 - i, stop=STOP)
    return requests


@functools.cache
def answers():
    """Of these requests, without drafts."""
    requests = requests_of()
    run(make_engine(MODEL), requests)
    return answers_of(requests)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 42])
def test_right_drafts_take_as_few_iterations_as_can_be(size):
    """With k right tokens in each draft an iteration makes k + 1. The first token comes with the
    prompt, undrafted, so n tokens take 1 + ceil((n - 1) / (k + 1)) iterations; a prompt that is
    copied or a single token is ready at once: ceil(n / (k + 1))."""
    requests, prompts = requests_of(), set()
    run(make_engine(MODEL, 16, 512, drafter=FakeDrafter(right(size), answers())), requests)
    for request in requests:
        assert request.segments == [Segment(0, 0, "a")]
        is_ready = len(request.prompt_ids) == 1 or tuple(request.prompt_ids) in prompts
        prompts.add(tuple(request.prompt_ids))
        left = len(request.tokens) - (not is_ready)
        assert request.steps == (not is_ready) + -(-left // (size + 1))
        whole, rest = divmod(left, size + 1)
        most = request.sampling.max_new_tokens - len(request.tokens)
        # of the last draft only what the response has room for beside the token that always comes
        last = rest if most else max(0, rest - 1)
        assert request.drafted == whole * size + last


@pytest.mark.parametrize("drafts", [right(0), noisy(0.9, 12)], ids=["none", "mostly right"])
def test_the_clock_is_the_mean_of_those_decoded(drafts):
    """Also while one waits, and while the prompt of another is prefilled."""
    engine = make_engine(MODEL, 2, 10, drafter=FakeDrafter(drafts, answers()))
    requests = requests_of()[2:5]
    for request in requests:
        engine.submit(request)
    clock = 0.0
    while engine.has_work:
        before = [len(request.tokens) for request in requests]
        engine.step()
        generated = [len(r.tokens) - n for r, n in zip(requests, before, strict=True)]
        decoded = [count for count in generated if count]
        clock += sum(decoded) / max(len(decoded), 1)
        assert engine.load().clock == pytest.approx(clock)
    assert engine.load().num_generated == sum(len(request.tokens) for request in requests)


@pytest.mark.parametrize("stop_at", [1, 2, 5, 11])
def test_stop_token_inside_a_draft(stop_at):
    """It ends the response there, and neither caller nor drafter is told of more."""
    [free] = make_requests([6])
    run(make_engine(MODEL), [free])
    stop = free.tokens[stop_at]
    assert free.tokens.index(stop) == stop_at
    [request] = make_requests([6], sampling(stop=[stop]))
    told = []

    class Listener(FakeDrafter):
        def observe(self, handles, generated, **rest):
            super().observe(handles, generated, **rest)
            told.extend(generated)

    drafter = Listener(right(20), answers_of([free]))
    engine = make_engine(MODEL, drafter=drafter)
    assert run(engine, [request]) == {0: "stop"}
    assert request.tokens == free.tokens[: stop_at + 1]
    assert request.logprobs == pytest.approx(free.logprobs[: stop_at + 1], abs=1e-5)
    assert told == [request.tokens[1:]]
    assert (request.steps, request.drafted) == (2, 20)
    assert engine.load().num_generated == stop_at + 1
    assert engine.kv_tokens == 0


def test_greedy_ties_go_to_the_smaller_token_whatever_is_drafted():
    """A head of rows with one element each: the same products, so exact ties, in any batch."""
    model = tiny_model()
    with torch.no_grad():
        weight_VD = model.lm_head.weight
        weight_VD.zero_()
        weight_VD[[7, 93], 0] = 3.0
        weight_VD[[40, 41], 0] = -3.0
    tied = {7: 93, 40: 41}
    how = sampling(temperature=0.0, max_new_tokens=30)
    expected = make_requests((3, 17, 9, 40), how)
    run(make_engine(model), expected)
    known = answers_of(expected)
    assert {token for answer in known.values() for token in answer} == set(tied)

    def larger(answer, at, room, rng):
        """The larger token of a tie at a random place, right ones around it."""
        tokens, place = answer[at : at + 6], rng.randrange(6)
        return line([tied[t] if i == place else t for i, t in enumerate(tokens)])

    requests = make_requests((3, 17, 9, 40), how)
    run(make_engine(model, drafter=FakeDrafter(larger, known)), requests)
    assert_same(requests, expected)
    assert sum(r.steps for r in requests) < sum(len(r.tokens) for r in requests)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("drafts", [right(5), noisy(0.5, 9), tree(0.5, 14), tree(0.8, 24)])
def test_on_cuda_drafted_equals_undrafted(drafts, dtype):
    lengths, model = (3, 3, 17, 1, 40, 225), tiny_model().to("cuda", dtype)
    expected = make_requests(lengths)
    run(make_engine(model), expected)
    requests = make_requests(lengths)
    drafter = FakeDrafter(drafts, answers_of(expected))
    run(make_engine(model, drafter=drafter), requests)
    assert_same(requests, expected)
    on_cpu = make_requests(lengths)
    run(make_engine(tiny_model().to(dtype)), on_cpu)
    assert [r.tokens for r in requests] == [r.tokens for r in on_cpu]
