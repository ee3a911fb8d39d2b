"""What the learner says of single tokens, against the formulas and against training without."""

import numpy as np
import pytest

from rhymeflow.learner.packing import pack
from rhymeflow.learner.token_details import CAPPED, CLIPPED, MASKED, TokenDetails
from tests.learner.builders import learner_config, made_up_batch, tiny_learner

VARIANTS = [
    {"off_policy_correction": "none"},
    {"off_policy_correction": "tis", "mask_truncated_completions": True},
    {"off_policy_correction": "decoupled", "num_minibatches": 2, "num_iterations": 2},
]


def details_of(batch, **variant):
    learner = tiny_learner(**variant)
    details = TokenDetails(batch, learner_config(**variant))
    metrics = learner.train(batch, 0, details)
    return learner, metrics, list(details.blobs())


def logprobs_before(batch):
    """Of every response, one by one, under the policy that training begins with."""
    learner = tiny_learner()
    rows = [pack(batch, [i], 1000)[0] for i in range(len(batch))]
    return [learner._policy.score(row)[0].numpy() for row in rows]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v["off_policy_correction"])
def test_logprobs_are_those_before_the_step_which_is_the_same_as_without_them(variant):
    batch = made_up_batch()
    learner, metrics, found = details_of(batch, **variant)
    for sample, (blob, flags), expected in zip(batch, found, logprobs_before(batch), strict=True):
        if variant.get("mask_truncated_completions") and sample.truncated:
            assert (blob, flags) == (None, bytes([MASKED]) * len(sample.completion_ids))
        else:
            np.testing.assert_allclose(np.frombuffer(blob, "<f4"), expected, rtol=1e-4, atol=1e-5)
            assert not max(flags) & MASKED
    other = tiny_learner(**variant)
    assert {**metrics, "step_time": 0} == {**other.train(batch, 0), "step_time": 0}
    assert learner.checksum() == other.checksum()


def test_a_token_is_clipped_where_its_ratio_is_past_the_clip_on_the_side_of_its_advantage():
    batch = made_up_batch()
    _, metrics, found = details_of(batch, off_policy_correction="none", scale_rewards="none")
    clipped = 0
    for sample, (blob, flags) in zip(batch, found, strict=True):
        group = [other.reward for other in batch if other.group == sample.group]
        advantage = sample.reward - sum(group) / len(group)
        ratio = np.exp(np.frombuffer(blob, "<f4") - np.float32(sample.logprobs))
        expected = ratio < 0.8 if advantage < 0 else (ratio > 1.28) & (advantage > 1e-12)
        assert list(flags) == list(CLIPPED * expected)
        clipped += sum(expected)
    tokens = sum(len(sample.completion_ids) for sample in batch)
    assert metrics["clip_ratio/region_mean"] == pytest.approx(clipped / tokens) != 0


@pytest.mark.parametrize("algorithm", ["sapo", "cispo", "gmpo"])
def test_what_is_called_clipped_is_what_the_surrogate_clips(algorithm):
    batch, how = made_up_batch(), {"algorithm": algorithm, "off_policy_correction": "none"}
    _, metrics, found = details_of(batch, **how)
    flags, expected = [], []
    for sample, (blob, of_sample) in zip(batch, found, strict=True):
        group = [other.reward for other in batch if other.group == sample.group]
        advantage = sample.reward - sum(group) / len(group)
        log_ratio = np.frombuffer(blob, "<f4") - np.float32(sample.logprobs)
        low, high = log_ratio < -0.4, log_ratio > 0.4
        expected += {
            "sapo": 0 * low,
            "cispo": log_ratio > np.log(5.0),
            "gmpo": low & (advantage < -1e-12) | high & (advantage > 1e-12),
        }[algorithm].tolist()
        flags += [flag & CLIPPED for flag in of_sample]
    assert flags == expected
    assert metrics["clip_ratio/region_mean"] == pytest.approx(np.mean(expected))
    assert any(expected) == (algorithm != "sapo")


def test_a_token_is_capped_where_its_weight_is():
    batch = made_up_batch()
    _, _, found = details_of(batch, off_policy_correction="tis", importance_sampling_cap=1.5)
    for sample, (blob, flags) in zip(batch, found, strict=True):
        u = np.exp(np.frombuffer(blob, "<f4") - np.float32(sample.logprobs))
        assert list(flags) == list(CAPPED * (u > 1.5)), "with one step nothing is clipped"
    assert any(max(flags) for _, flags in found)
