"""A response in several sequences counts as one, and is trained on like the same tokens in one."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rhymeflow.config import Config
from rhymeflow.learner.algorithms.normalisations import NORMALISATIONS
from rhymeflow.learner.sample import Sample
from rhymeflow.store.branches import Asked
from rhymeflow.store.reader import TrajectoryRecord
from rhymeflow.workers.restore import samples
from tests.learner.builders import close, gradients, made_up_batch, tiny_learner, tiny_model
from tests.learner.test_single import same_metrics


def divided(sample: Sample) -> list[Sample]:
    """The sample, and before it its beginning as a sequence of its own, which trains these."""
    length = len(sample.completion_ids)
    if length < 4:
        return [sample]
    cut = length // 2
    is_observed = sample.observed or [False] * length
    if all(is_observed[:cut]) or all(is_observed[cut:]):
        return [sample]
    first = replace(
        sample,
        completion_ids=sample.completion_ids[:cut],
        logprobs=sample.logprobs[:cut],
        versions=sample.versions[:cut],
        observed=is_observed[:cut],
    )
    return [first, replace(sample, observed=[True] * cut + is_observed[cut:], sequence=1)]


@pytest.mark.parametrize(
    "options",
    [*({"loss_type": each} for each in NORMALISATIONS), {"algorithm": "ppo", "gamma": 0.9}],
    ids=lambda options: next(iter(options.values())),
)
def test_a_response_in_two_sequences_is_trained_on_like_one(options):
    """For each normalisation: of responses, of tokens, of a batch cut into steps; by a critic."""
    batch = made_up_batch(turns=True)
    parts = [part for sample in batch for part in divided(sample)]
    assert len(parts) > len(batch) + 8
    how = {**options, "beta": 0.05, "off_policy_correction": "none"}
    (grads, found), (same_grads, same) = (
        gradients(tiny_learner(**how, num_minibatches=2, max_tokens_per_microbatch=4096), each)
        for each in (batch, parts)
    )
    close(same_grads, grads, 2e-5)
    by_sequence = {"num_tokens", "packing/computed_share", "turns/mean"}
    by_sequence |= {name for name in found if name.endswith(("_min", "_max")) and "clip" in name}
    found, same = (
        {name: value for name, value in each.items() if name not in by_sequence}
        for each in (found, same)
    )
    same_metrics(same, found)


@pytest.mark.parametrize("algorithm", ["reinforce_plus_plus", "ppo"])
def test_advantages_of_tokens_are_those_of_the_same_tokens_in_one_sequence(algorithm):
    """The reward, discounted, is after the last sequence; so is the KL of later ones, and a value
    is followed by that of the next sequence."""
    batch = made_up_batch(turns=True)
    parts = [part for sample in batch for part in divided(sample)]
    how = {"beta": 0.2, "kl_in": "reward", "kl_estimator": "k1", "gamma": 0.9}
    learner = tiny_learner(algorithm=algorithm, **how)
    learner._reference.model.load_state_dict(tiny_model(seed=5).state_dict())
    if learner._critic is not None:
        head = learner._critic.optimizer._parameters["lm_head.weight"]
        head.data = torch.linspace(-0.3, 0.3, head.numel()).view_as(head)
    expected, found = (learner._advantages(each) for each in (batch, parts))
    assert len(found.of_tokens) == len(parts) > len(expected.of_tokens)
    assert np.concatenate(found.of_tokens) == pytest.approx(
        np.concatenate(expected.of_tokens), abs=1e-4
    )
    assert found.values == pytest.approx(expected.values)


def test_each_sampled_token_is_trained_on_once_after_what_the_policy_read():
    """A conversation of two turns, one with another second turn, and one that begins anew."""
    row = [10, 11, 1, 2, 12, 3, 13, 14, 4, 20, 5]
    calls = [Asked(0, 2, 0), Asked(4, 5, 4), Asked(6, 8, 4), Asked(9, 10, 0)]
    observed = [any(c.start <= i < c.end for c in calls) for i in range(len(row))]
    logprobs = [0.0 if o else -float(t) for t, o in zip(row, observed, strict=True)]
    record = TrajectoryRecord(
        3, 1, [99], row, logprobs, list(range(11)), 0.5, "stop", {}, observed, calls
    )
    found = samples([record], Config())
    assert [(s.prompt_ids, s.completion_ids) for s in found] == [
        ([10, 11], [1, 2, 12, 3]),
        ([10, 11], [1, 2, 13, 14, 4]),
        ([20], [5]),
    ]
    trained = [s.sampled(s.completion_ids).tolist() for s in found]
    assert trained == [[1, 2, 3], [4], [5]]
    assert [s.sequence for s in found] == [0, 1, 2]
    assert {(s.group, s.reward) for s in found} == {(3, 0.5)}
    for sample in found:
        sampled = sample.sampled(sample.logprobs)
        assert (-sampled == np.array(sample.sampled(sample.completion_ids))).all()
        assert sorted(sample.versions) == sample.versions
