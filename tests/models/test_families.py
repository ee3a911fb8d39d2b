"""Ways to attend and to make logits: engine, learner and transformers' eager code agree."""

import numpy as np
import pytest
import torch

from rhymeflow.config import LearnerConfig, RolloutConfig
from rhymeflow.engine.base import NoiseKey, Request
from rhymeflow.learner.packing import pack
from rhymeflow.learner.policy import proved_scorer
from rhymeflow.learner.sample import Sample
from tests.engine.drafters import FakeDrafter, answers_of, noisy
from tests.engine.models import make_engine, run, sampling
from tests.models.families import TYPES, model_of

CLOSE = 1e-4
NEW = 20


def requests():
    """Two with the same prompt; longer than a window, and than a chunk of the prefill."""
    return [
        Request(
            i,
            [(3 * length + 5 * j * j) % 147 + 3 for j in range(length)],
            NoiseKey(i, 0, i),
            sampling(max_new_tokens=NEW),
        )
        for i, length in enumerate((3, 3, 17, 1, 30))
    ]


def engine_of(model, **more):
    return make_engine(model, max_prefill_tokens=8, **more)


def eager_logprobs(model, prompt_ids, tokens):
    """Of the tokens after the prompt, under `model`, whose attention is eager."""
    logits_1TV = model(torch.tensor([[*prompt_ids, *tokens]]), use_cache=False).logits
    logprob_TV = logits_1TV[0, len(prompt_ids) - 1 : -1].float().log_softmax(-1)
    return logprob_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def moved(model, requests):
    """Run them with an interruption: what has begun goes on in another engine."""
    one, other = engine_of(model), engine_of(model)
    for request in requests:
        one.submit(request)
    for _ in range(NEW // 2 + 4):
        one.step()
    run(other, one.interrupt())


@pytest.mark.parametrize("kind", TYPES)
def test_the_engine_samples_from_the_models_own_distribution(kind):
    """Prefilled in chunks, in company, drafted or not, moved or not."""
    model, alone = model_of(kind, **TYPES[kind]), requests()
    engine = engine_of(model)
    engine.prove()
    run(engine, alone)
    drafted, other = requests(), requests()
    run(engine_of(model, drafter=FakeDrafter(noisy(0.7, 6), answers_of(alone))), drafted)
    moved(model, other)
    for one, *same in zip(alone, drafted, other, strict=True):
        assert [each.tokens for each in same] == [one.tokens] * 2
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for one in alone:
            expected = eager_logprobs(model, one.prompt_ids, one.tokens)
            assert one.logprobs == pytest.approx(expected.tolist(), abs=CLOSE)


@pytest.mark.parametrize("kind", TYPES)
def test_the_learner_has_the_models_own_gradient(kind):
    """Of the sum of the log-probabilities, in a row in which samples share their beginnings."""
    rng, samples = np.random.default_rng(0), []
    for _ in range(2):
        prompt, begun = rng.integers(3, 150, 5).tolist(), rng.integers(3, 150, 3).tolist()
        for length in (1, 9, 20):
            tokens = [*begun, *rng.integers(3, 150, length).tolist()]
            nothing = [0] * len(tokens)
            samples.append(Sample(0, prompt, tokens, [0.0] * len(tokens), nothing, 0.0, False))
    (row,) = pack(samples, range(len(samples)), 1000)
    model = model_of(kind, **TYPES[kind])
    scorer = proved_scorer(model, RolloutConfig(), LearnerConfig(max_steps=1))
    logprob_R, _ = scorer.backward(row, lambda logprob_C, _: logprob_C.sum())
    found = gradients(model)
    model.set_attn_implementation("eager")
    own = [eager_logprobs(model, each.prompt_ids, each.completion_ids) for each in samples]
    torch.cat(own).sum().backward()
    torch.testing.assert_close(logprob_R, torch.cat(own).detach(), rtol=0, atol=CLOSE)
    expected = gradients(model)
    largest = max(float(each.abs().max()) for each in expected.values())
    for name, gradient in expected.items():
        error = float((found[name] - gradient).abs().max())
        assert error <= CLOSE * largest, name


def gradients(model):
    """Take the gradients of all parameters; 0 if one has none."""
    found = {
        name: torch.zeros_like(each) if each.grad is None else each.grad
        for name, each in model.named_parameters()
    }
    model.zero_grad(set_to_none=True)
    return found
