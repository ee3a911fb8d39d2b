"""The loss and its gradient against direct formulas."""

import math
from itertools import islice

import pytest
import torch
from torch.nn.functional import cross_entropy

from rhymeflow.learner.sample import Sample
from rhymeflow.sft.train import SupervisedLearner, batches
from tests.learner.builders import close, learner_config, made_up_batch, rollout_config, tiny_model


def learner(**changes: object) -> SupervisedLearner:
    config = learner_config(**changes)
    return SupervisedLearner(tiny_model(), None, config, rollout_config(), torch.float32)


def direct(batch: list[Sample]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients, a sample at a time, by plain transformers and cross-entropy."""
    model = tiny_model(attn="eager")
    num_learnt = sum(len(s.completion_ids) - sum(s.observed) for s in batch)
    total = 0.0
    for sample in batch:
        ids = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
        labels = ids[0].clone()
        labels[: len(sample.prompt_ids)] = -100
        for place, is_observed in enumerate(sample.observed, len(sample.prompt_ids)):
            if is_observed:
                labels[place] = -100
        logits = model(input_ids=ids).logits[0, :-1]
        loss = cross_entropy(logits, labels[1:], reduction="sum") / num_learnt
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("max_tokens", [8192, 24])
def test_loss_and_gradient_are_the_direct_formulas(max_tokens):
    batch = made_up_batch(turns=True)
    ours = learner(max_tokens_per_microbatch=max_tokens, logits_chunk_size=7)
    kept: dict[str, torch.Tensor] = {}

    def look(rate: float) -> float:
        kept.update({n: m.grad.clone() for n, m in ours._optimizer._masters.items()})
        return 0.0

    ours._optimizer.step = look
    metrics = ours.fit(batch, 0)
    loss, gradients = direct(batch)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert ours.loss(batch) == pytest.approx(loss, rel=1e-5)
    close(kept, gradients, 1e-4)


def test_what_is_observed_after_the_last_learnt_token_has_no_part():
    sample, count = Sample(0, [4], [5, 6, 7], [0.0] * 3, [0] * 3, 0.0, False), 4
    observed = [False, False, False, True]
    longer = Sample(
        0, [4], [5, 6, 7, 8], [0.0] * count, [0] * count, 0.0, False, observed=observed
    )  # fmt: skip
    assert learner().loss([longer]) == pytest.approx(learner().loss([sample]), rel=1e-6)


def test_batches_have_every_row_once_an_epoch_and_the_tokens_asked_for():
    samples = made_up_batch(groups=15, members=2, turns=True)
    number = {id(sample): place for place, sample in enumerate(samples)}
    some = list(islice(batches(samples, 40, 3, shuffle=True), 30))
    order = [number[id(sample)] for batch in some for sample in batch]
    assert sorted(order[:30]) == sorted(order[30:60]) == list(range(30))
    assert order[:30] != order[30:60]
    for batch in some:
        sizes = [len(s.prompt_ids) + len(s.completion_ids) for s in batch]
        assert sum(sizes) >= 40 > sum(sizes[:-1])
    straight = next(batches(samples, 40, 3, shuffle=False))
    assert [number[id(sample)] for sample in straight] == list(range(len(straight)))


def test_a_step_whose_gradient_is_not_finite_is_skipped(monkeypatch):
    ours = learner()
    before = {name: each.clone() for name, each in ours.rows().items()}
    monkeypatch.setattr(ours._optimizer, "_norm", lambda: math.nan)
    ours.fit(made_up_batch(), 0)
    assert "the gradient is not finite" in ours.skipped[0]
    assert all(torch.equal(before[name], each) for name, each in ours.rows().items())
    monkeypatch.undo()
    ours.fit(made_up_batch(), 1)
    assert not ours.skipped
