"""What engine and learner compute of a small model, against transformers' eager code."""

import dataclasses
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rhymeflow.config import LearnerConfig, ModelConfig, RolloutConfig
from rhymeflow.engine.base import Request
from rhymeflow.learner.packing import PackedRow, pack
from rhymeflow.learner.policy import proved_scorer
from rhymeflow.learner.sample import Sample
from rhymeflow.models.load import load_model
from tests.engine.drafters import FakeDrafter, answers_of, noisy
from tests.engine.models import VOCABULARY, converse, make_engine, make_requests, run, sampling
from tests.learner.builders import made_up_batch

CPU = torch.device("cpu")
TOLERANCE = 1e-4  # nats, and share of the largest gradient
LENGTHS = (3, 3, 17, 1, 40)  # of prompts; the first two have the same


def load(directory: Path) -> PreTrainedModel:
    config = ModelConfig(name=str(directory), dtype="float32")
    return load_model(config, dtype=torch.float32, device=CPU)


def logprobs_of(eager: PreTrainedModel, prompt: list[int], tokens: list[int]) -> Tensor:
    """Of the tokens, by the plain model, recomputed from the beginning."""
    logits = eager(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
    logp = logits.float().log_softmax(-1)[len(prompt) - 1 : -1]
    return logp.gather(1, torch.tensor(tokens)[:, None])[:, 0]


# -- Engine ----------------------------------------------------------------------------------------


def check_engine(model: PreTrainedModel, eager: PreTrainedModel) -> None:
    """Chunked prefill and shared prompts in a batch, moved to another engine; then drafts."""
    how = sampling(max_new_tokens=12)
    first, second = make_engine(model, max_prefill_tokens=16), make_engine(model)
    moved = make_requests(LENGTHS, how)
    for each in moved:
        first.submit(each)
    for _ in range(3):  # some are in their prompts, others in their responses
        first.step()
    run(second, first.interrupt())
    _check_logprobs(moved, eager)

    drafted = make_requests(LENGTHS, how)
    drafter = FakeDrafter(noisy(0.7, 4, VOCABULARY), answers_of(moved))
    run(make_engine(model, drafter=drafter), drafted)
    _check_same(drafted, moved)
    assert sum(each.drafted for each in drafted) > 0


def check_turns(model: PreTrainedModel, eager: PreTrainedModel) -> None:
    """Turns, each of which finds the one before in the cache."""
    engine = make_engine(model, kv_capacity=10_000)
    talks = make_requests(LENGTHS, sampling(max_new_tokens=48, stop=range(0, VOCABULARY, 6)))
    converse(engine, engine.step, talks, turns=3)
    _check_logprobs(talks, eager)


def _check_logprobs(requests: list[Request], eager: PreTrainedModel) -> None:
    for request in requests:
        found = torch.tensor(request.logprobs)
        with torch.no_grad():
            expected = logprobs_of(eager, request.prompt_ids, request.tokens)
        is_sampled = found != 0.0  # 0 is said of what an environment answered
        assert float((found - expected)[is_sampled].abs().max()) < TOLERANCE, request.id


def _check_same(requests: list[Request], expected: list[Request]) -> None:
    for one, other in zip(requests, expected, strict=True):
        assert one.tokens == other.tokens, one.id
        difference = torch.tensor(one.logprobs) - torch.tensor(other.logprobs)
        assert float(difference.abs().max()) < TOLERANCE, one.id


# -- Learner ---------------------------------------------------------------------------------------


def batch() -> list[Sample]:
    """Groups with the same prompts, and responses that begin alike or are long."""
    samples = made_up_batch(groups=3, members=2, turns=True)
    first = samples[0]
    ids = [*first.completion_ids[: len(first.completion_ids) // 2], 5, 6, 7]
    plain = {"logprobs": [-1.0] * len(ids), "versions": [0] * len(ids), "observed": []}
    samples.append(dataclasses.replace(first, completion_ids=ids, **plain))
    ids = [3 + 7 * i % 140 for i in range(70)]  # longer than a chunk of the delta rule
    plain = {"logprobs": [-1.0] * len(ids), "versions": [0] * len(ids), "observed": []}
    samples.append(dataclasses.replace(samples[-2], completion_ids=ids, **plain))
    return samples


def check_learner(model: PreTrainedModel, eager: PreTrainedModel) -> None:
    """Log-probabilities and gradients of a packed row with shared beginnings."""
    samples = batch()
    (row,) = pack(samples, range(len(samples)), 10**6)
    assert len(row.tokens_T) < sum(len(s.prompt_ids + s.completion_ids) - 1 for s in samples)
    weight_R = torch.randn(len(row.targets_R), generator=torch.Generator().manual_seed(2))

    parts = []
    for sample in samples:
        logprobs = logprobs_of(eager, sample.prompt_ids, sample.completion_ids)
        parts.append(logprobs[~torch.tensor(sample.observed or [False] * len(logprobs))])
    expected_R = torch.cat(parts)
    (expected_R * weight_R).sum().backward()

    found_R = backward(model, row, weight_R)
    assert float((found_R - expected_R).detach().abs().max()) < TOLERANCE
    expected, found = gradients(eager), gradients(model)
    assert expected.keys() == found.keys()
    largest = max(float(each.abs().max()) for each in expected.values())
    for name, gradient in expected.items():
        error = float((found[name] - gradient).abs().max()) / largest
        assert error < TOLERANCE, f"{name}: {error}"


def backward(model: PreTrainedModel, row: PackedRow, weight_R: Tensor) -> Tensor:
    """The learner's log-probabilities; their weighted sum's gradient is added."""
    scorer = proved_scorer(model, RolloutConfig(), LearnerConfig(max_steps=1))
    logprob_R, _ = scorer.backward(
        row, lambda logprob_C, chunk: (logprob_C * weight_R[chunk]).sum()
    )
    return logprob_R


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(each) if each.grad is None else each.grad
        for name, each in model.named_parameters()
    }
