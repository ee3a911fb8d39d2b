"""What is sampled in bfloat16 follows the model's softmax, drafted or not.

There rounding may differ with the number of rows, so tokens are compared in distribution, against
the exact probabilities of all outcomes (float32 arithmetic on the same, rounded, weights). A total
variation distance t gives a noncentral chi-square of at least 20,000 * 4 t^2, so 0.03 is noticed in
98% of cases, and a right engine would fail once in 9,000 (seeds are fixed)."""

import itertools

import torch

from rhymeflow.engine.base import NoiseKey, Request
from rhymeflow.models import attention
from tests.engine.drafters import FakeDrafter, noisy
from tests.engine.models import make_engine, run, sampling
from tests.engine.test_noise import chi_square, upper_limit
from tests.learner.builders import tiny_model

VOCABULARY, TOKENS, RESPONSES = 3, 3, 20_000
PROMPT = [1, 2]
OUTCOMES = list(itertools.product(range(VOCABULARY), repeat=TOKENS))


def small_model(implementation=attention.NAME):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": VOCABULARY}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    more = {"tied": False, "initializer_range": 0.2}
    return tiny_model(seed=1, attn=implementation, **sizes, **heads, **more).bfloat16()


def probabilities():
    """Of each outcome, by the plain model on all of them."""
    ids = torch.tensor([[*PROMPT, *outcome] for outcome in OUTCOMES])
    with torch.no_grad():
        logprobs = small_model("eager").float()(ids).logits.double().log_softmax(2)
    places = torch.arange(len(PROMPT), ids.shape[1])
    chosen = logprobs[:, places - 1].gather(2, ids[:, places, None])
    return chosen.sum((1, 2)).exp().tolist()


class OwnPast(FakeDrafter):
    """Knows what each response was, as a history whose noise rhymes does."""

    def begin(self, prompt_ids, tokens, *, sample, noise_epoch):
        handle, self.begun = self.begun, self.begun + 1
        self.texts[handle] = (list(tokens), self.answers[handle])
        return handle


def generated(drafter=None):
    how = sampling(max_new_tokens=TOKENS)
    requests = [Request(i, PROMPT, NoiseKey(i // 16, 0, i % 16), how) for i in range(RESPONSES)]
    run(make_engine(small_model(), max_num_seqs=500, drafter=drafter), requests)
    return requests


def test_what_is_sampled_follows_the_softmax():
    """Drafts are an earlier making of the same, half of each draft's tokens at random."""
    expected, plain = probabilities(), generated()
    assert min(expected) * RESPONSES > 10
    answers = [request.tokens for request in plain]
    drafted = generated(OwnPast(noisy(0.5, TOKENS, VOCABULARY), answers))
    assert sum(request.drafted for request in drafted) > RESPONSES
    assert sum(request.steps for request in drafted) < 2.2 * RESPONSES
    for requests in (plain, drafted):
        counts = dict.fromkeys(OUTCOMES, 0)
        for request in requests:
            counts[tuple(request.tokens)] += 1
        limit = upper_limit(len(OUTCOMES) - 1, sigmas=3.7)
        assert chi_square(list(counts.values()), expected) < limit
