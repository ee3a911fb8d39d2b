"""Our sampler, our logits processor and our drafts on tensors, without vLLM: what stands is what
decoding one by one would draw."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.engine.base import Sampling
from rhymeflow.engine.native.sampler import Draws, sample
from rhymeflow.engine.vllm import sampler
from rhymeflow.engine.vllm.sampler import (
    PLACEHOLDER,
    CounterSampler,
    NoiseSlots,
    arguments,
    draws_of,
    verify,
)
from rhymeflow.engine.vllm.speculator import NoProposals, NoSpeculation, put_drafts
from rhymeflow.engine.vllm.worker import WorkerExtension

VOCABULARY = 130
HOWS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_p=st.sampled_from([1.0, 0.8]),
    top_k=st.sampled_from([0, 5]),
    max_new_tokens=st.just(9),
    stop_token_ids=st.just(frozenset()),
)
PLAIN = Sampling(1.0, 1.0, 0, 50, frozenset())
REQUESTS = st.lists(
    st.tuples(HOWS, st.integers(0, 2**64 - 1), st.integers(1, 9), st.integers(0, 5)),
    min_size=1,
    max_size=5,
)


def logits_of(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(count, VOCABULARY, generator=generator)


def alone(row, how, stream, position):
    (token,), (logprob,) = sample(row[None], [Draws(how, stream, [position])])
    return token, logprob


@given(REQUESTS, st.integers(0, 99), st.randoms(use_true_random=False))
def test_tokens_stand_up_to_the_first_wrong_draft(requests, seed, rng):
    """Of logits of lower precision, which are drawn from in float32."""
    logits = logits_of(sum(1 + size for *_, size in requests), seed).bfloat16()
    draws, drafts, expected, first = [], [], [], 0
    for how, stream, position, size in requests:
        rows = logits[first : first + size + 1]
        first += size + 1
        # One by one: each token from its own row, with its own position's noise.
        due = [alone(row.float(), how, stream, position + i) for i, row in enumerate(rows)]
        tokens = [token for token, _ in due]
        right = rng.randrange(size + 1)
        drafts.append(tokens[:right] + [(token + 1) % VOCABULARY for token in tokens[right:size]])
        draws.append(draws_of(arguments(how, stream, 20), 20 + position, size + 1))
        expected.append(due[: right + 1])
    assert draws_of(arguments(PLAIN, 1, 20), 0, 1).positions == [0]  # a prompt being prefilled
    tokens_NW, logprobs_NW = verify(logits, draws, drafts)
    for i, due in enumerate(expected):
        count = len(due)
        assert tokens_NW[i].tolist()[:count] == [token for token, _ in due]
        assert set(tokens_NW[i].tolist()[count:]) <= {PLACEHOLDER}
        torch.testing.assert_close(logprobs_NW[i, :count], torch.tensor([x for _, x in due]))


def test_it_reads_the_runner(monkeypatch):
    """Both ways in which vLLM calls it, with a runner that has what is read of it."""
    monkeypatch.setattr(sampler, "output", lambda tokens, logprobs, device: tokens.tolist())
    extras = {name: arguments(PLAIN, stream, 10) for name, stream in (("a", 5), ("b", 6))}
    runner = SimpleNamespace(
        requests={
            name: SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra))
            for name, extra in extras.items()
        },
        input_batch=SimpleNamespace(req_ids=["b", "a"], num_tokens_no_spec=[13, 30]),
    )
    ours, logits = CounterSampler(runner), logits_of(3, 1)
    (b, _), (a, _) = alone(logits[0], PLAIN, 6, 3), alone(logits[1], PLAIN, 5, 20)
    assert ours(logits=logits[:2], sampling_metadata=None) == [[b], [a]]
    metadata = SimpleNamespace(draft_token_ids=torch.tensor([b]), num_draft_tokens=[1, 0])
    second, _ = alone(logits[2], PLAIN, 6, 4)
    drafted = ours(metadata, None, logits[[0, 2, 1]], None)
    assert drafted == [[b, second], [a, PLACEHOLDER]]
    assert ours.num_calls == 2


# -- The second runner -----------------------------------------------------------------------------


PLACES = (0, 1, 7)


@given(REQUESTS, st.integers(0, 99))
def test_the_processor_leaves_the_token_that_the_native_sampler_draws(requests, seed):
    logits = logits_of(3 * len(requests), seed)
    states = SimpleNamespace(max_num_reqs=9, device=torch.device("cpu"))
    slots, rows = NoiseSlots(None, states), []
    slots.add_request(0, SimpleNamespace(extra_args=None))  # as vLLM warms up
    for slot, (how, stream, prompt, _) in enumerate(requests, 2):
        slots.add_request(slot, SimpleNamespace(extra_args=arguments(how, stream, prompt)))
        rows += [(slot, prompt + place - 1) for place in PLACES]
    slots.apply_staged_writes()
    slot_R, position_R = torch.tensor(rows).T
    used = np.arange(2, 2 + len(requests))
    context = SimpleNamespace(expanded_idx_mapping=slot_R, pos=position_R, idx_mapping_np=used)
    found = slots.apply(logits.clone(), context)
    for row, ((how, stream, *_), place) in enumerate(itertools.product(requests, PLACES)):
        token, logprob = alone(logits[row], how, stream, place)
        assert found[row].isfinite().nonzero().flatten().tolist() == [token]
        torch.testing.assert_close(float(found[row, token]), logprob, atol=1e-5, rtol=0)


NUM_SLOTS, NUM_TOKENS = 5, 4


@pytest.mark.parametrize(
    ("drafts", "expected"),
    [
        ({"b": [7, 8, 9], "a": [5]}, {0: [7, 8, 9], 3: [5]}),
        ({"a": [1, 2, 3, 4]}, {3: [1, 2, 3, 4]}),
    ],
)
def test_drafts_are_put_in_the_slots_of_their_requests(drafts, expected):
    tokens = torch.full((NUM_SLOTS, NUM_TOKENS), 99)
    states = SimpleNamespace(draft_tokens=tokens, req_id_to_index={"a": 3, "b": 0, "c": 1})
    put_drafts(states, drafts)
    for slot in range(NUM_SLOTS):
        due = expected.get(slot, [])
        assert tokens[slot, : len(due)].tolist() == due
        assert due or (tokens[slot] == 99).all()


def test_what_proposes_proposes_nothing():
    assert NoProposals(None).propose([[1], [], [2, 3]], None, None) == [[], [], []]
    tokens = torch.full((NUM_SLOTS, NUM_TOKENS), 99)
    states = SimpleNamespace(draft_tokens=tokens, req_id_to_index={"a": 3})
    worker = WorkerExtension()
    worker.model_runner = SimpleNamespace(req_states=states, speculator=None)
    worker.rhymeflow_speculate()
    speculator = worker.model_runner.speculator
    assert isinstance(speculator, NoSpeculation)
    batch = SimpleNamespace(num_reqs=2)
    assert speculator.propose(batch, None, num_speculative_tokens=2).shape == (2, NUM_TOKENS)
    worker.rhymeflow_draft({"a": [6]})
    assert tokens[3, 0].item() == 6
