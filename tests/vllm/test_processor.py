"""The logits processor for vLLM's second runner, on tensors: the token that the sampler draws."""

import torch

from rhymeflow.engine.base import Sampling
from rhymeflow.engine.native.sampler import Draws, sample
from rhymeflow.engine.vllm.processor import Slots, decide
from rhymeflow.engine.vllm.sampler import arguments

VOCABULARY = 150
HOWS = [
    Sampling(temperature, top_p, top_k, 9, frozenset())
    for temperature, top_p, top_k in ((0.0, 1.0, 0), (1.0, 1.0, 0), (0.7, 0.9, 0), (1.3, 1.0, 4))
]


def test_it_leaves_the_token_that_the_native_sampler_draws():
    slots = Slots(9, torch.device("cpu"))
    requests = {}
    for i in range(6):
        how, stream = HOWS[i % len(HOWS)], (2**64 - 1) // (i + 1)
        requests[8 - i] = how, stream, 20 + i
        slots.set(8 - i, arguments(how, stream, 20 + i))
    rows = [(slot, place) for slot in requests for place in (0, 1, 7)]
    torch.manual_seed(0)
    logits = 3 * torch.randn(len(rows), VOCABULARY)
    decided = decide(
        logits.clone(),
        slots,
        torch.tensor([slot for slot, _ in rows]),
        torch.tensor([requests[slot][2] + place for slot, place in rows], dtype=torch.int32),
        list(requests),
    )
    for row, (slot, place) in enumerate(rows):
        how, stream, _ = requests[slot]
        (token,), (logprob,) = sample(logits[row][None], [Draws(how, stream, [place])])
        assert int(decided[row].argmax()) == token
        assert int(decided[row].isfinite().sum()) == 1
        torch.testing.assert_close(float(decided[row, token]), logprob, atol=1e-5, rtol=0)


def test_a_slot_is_taken_by_another_request():
    slots = Slots(2, torch.device("cpu"))
    greedy, plain = HOWS[:2]
    slots.set(0, arguments(plain, 3, 5))
    slots.set(0, arguments(greedy, 4, 6))
    assert slots.distributions([0]) == [(1, (0.0, 0, 1.0))]
