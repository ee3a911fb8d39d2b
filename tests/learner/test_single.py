from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.learner.algorithms.normalisations import NORMALISATIONS
from rhymeflow.learner.metrics import batch_metrics
from rhymeflow.learner.minibatch import split, step_scales
from rhymeflow.learner.sample import Sample
from rhymeflow.learner.token_details import TokenDetails
from tests.learner.builders import (
    close,
    equal,
    gradients,
    learner_config,
    made_up_batch,
    rollout_config,
    tiny_learner,
)


def same_metrics(found: dict, expected: dict, **tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name in expected.keys() - {"step_time"}:
        near = pytest.approx(expected[name], **(tolerance or {"rel": 1e-4, "abs": 1e-6}))
        assert found[name] == near, name


def test_samples_without_advantage_are_measured_but_not_differentiated():
    batch = made_up_batch()
    advantages, cpu = np.array([float(s.group != 1) for s in batch]), torch.device("cpu")
    (micros,) = split(batch, advantages, learner_config(), rollout_config(), cpu)
    assert [(m.needs_grad, len(m.row.members)) for m in micros] == [(True, 12), (False, 4)]
    (micros,) = split(batch, 0 * advantages, learner_config(beta=0.1), rollout_config(), cpu)
    assert [m.needs_grad for m in micros] == [True]


def test_a_batch_masked_whole_trains_on_nothing():
    batch = [replace(sample, truncated=True) for sample in made_up_batch()]
    learner = tiny_learner(mask_truncated_completions=True, num_minibatches=2)
    metrics = learner.train(batch, 0)
    assert metrics["loss"] == metrics["grad_norm"] == metrics["entropy"] == 0.0
    assert metrics["completions/clipped_ratio"] == 1.0


def test_what_an_environment_answered_is_in_no_loss_and_no_statistics():
    """Whatever log-probabilities are made up for it; and its tokens are read all the same."""
    batch = made_up_batch(turns=True)
    other = [
        replace(s, logprobs=[9.0 if o else x for x, o in zip(s.logprobs, s.observed, strict=True)])
        for s in batch
    ]
    (grads, found), (same_grads, same) = (gradients(tiny_learner(), b) for b in (batch, other))
    same_metrics(found, same, rel=0, abs=0)
    assert equal(grads, same_grads)
    lengths = [len(s.completion_ids) - sum(s.observed) for s in batch]
    assert found["completions/mean_length"] == pytest.approx(sum(lengths) / len(lengths))
    seen = [
        replace(s, completion_ids=[3 if o else x for x, o in zip(s.completion_ids, s.observed)])  # noqa: B905
        for s in batch
    ]
    assert gradients(tiny_learner(), seen)[1]["loss"] != found["loss"]


@given(st.lists(st.booleans(), min_size=1, max_size=12).map(lambda rest: [False, *rest]))
def test_turns_are_counted_where_the_policy_goes_on(observed):
    found = Sample(0, [1], [1] * len(observed), [0.0] * len(observed), [0] * len(observed), 0.0,
                   truncated=False, observed=observed)  # fmt: skip
    text = "".join("o" if each else "s" for each in observed)
    assert found.num_turns == len([part for part in text.split("o") if part])


def test_minibatches_split_by_whole_groups_and_dapo_normalises_over_the_batch():
    batch = made_up_batch()
    config = learner_config(num_minibatches=2)
    cpu = torch.device("cpu")
    steps = split(batch, torch.ones(16).numpy(), config, rollout_config(), cpu)
    groups = [{batch[i].group for m in step for i in m.row.members} for step in steps]
    assert groups == [{0, 1}, {2, 3}]
    tokens = sum(len(s.completion_ids) for s in batch)
    scales = step_scales(batch, config, rollout_config())
    for step, scale in zip(steps, scales, strict=True):
        assert scale * step[0].inputs.weight_R[0] == pytest.approx(2 / tokens)


@pytest.mark.parametrize("loss_type", NORMALISATIONS)
@pytest.mark.parametrize("cuts", [(4,), (8, 4), (4, 4, 4, 4)], ids=str)
def test_groups_that_are_accumulated_early_are_part_of_the_batch(loss_type, cuts):
    """Whatever they are, and if nothing is left: the same step and metrics as of the whole."""
    batch = made_up_batch()
    options = {"loss_type": loss_type, "beta": 0.1, "max_tokens_per_microbatch": 64}
    whole, early = tiny_learner(**options), tiny_learner(**options)
    ends = [*accumulate(cuts, initial=0), len(batch)]
    parts = [batch[start:end] for start, end in pairwise(ends)]
    of_whole, *of_parts = (TokenDetails(b, learner_config(**options)) for b in (batch, *parts))
    expected = whole.train(batch, 0, of_whole)
    for part, details in zip(parts[:-1], of_parts, strict=False):
        early.accumulate(part, details)
    found = early.train(parts[-1], 0, of_parts[-1])
    blobs = [blob for details in of_parts for blob in details.blobs()]
    for (logprobs, flags), (due, due_flags) in zip(blobs, of_whole.blobs(), strict=True):
        assert flags == due_flags
        assert np.frombuffer(logprobs, "<f4") == pytest.approx(np.frombuffer(due, "<f4"), abs=1e-5)
    same_metrics(found, expected)
    close(early.rows(), whole.rows(), 1e-4)
    again = early.train(made_up_batch(seed=1), 1)
    assert again["loss"] == pytest.approx(whole.train(made_up_batch(seed=1), 1)["loss"], rel=1e-3)


def test_the_share_of_tokens_that_are_computed():
    """Of two groups with prompts of 3 tokens, of which 2 are in common: in the one all of the
    responses is in common, in the other nothing."""
    batch = [
        Sample(group, [3, 4, 5 + group], tokens, [-1.0] * 4, [0] * 4, float(member), False)
        for group, second in ((0, [6, 6]), (1, [6, 7]))
        for member, token in enumerate(second)
        for tokens in [[token, 8, 9, 2]]
    ]
    metrics = tiny_learner().train(batch, 0)
    assert metrics["packing/computed_share"] == pytest.approx((3 + 3 + 1 + 6) / (2 * (3 + 6)))


def test_what_is_forgotten_has_no_part_in_the_step():
    learner, other = tiny_learner(), tiny_learner()
    learner.accumulate(made_up_batch(seed=3)[:8])
    learner.forget()
    batch = made_up_batch()
    same_metrics(learner.train(batch, 0), other.train(batch, 0), rel=0, abs=0)
    assert equal(learner.rows(), other.rows())


def test_several_steps_per_batch_clip_around_the_policy_at_the_start():
    options = {"off_policy_correction": "tis", "learning_rate": 0.02}
    learner = tiny_learner(num_iterations=3, num_minibatches=2, **options)
    metrics = learner.train(made_up_batch(), 0)
    assert metrics["clip_ratio/region_mean"] > 0.0
    assert metrics["clip_ratio/region_mean"] == pytest.approx(
        metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]
    )
    assert learner.version == 1
    once = tiny_learner(**options).train(made_up_batch(), 0)
    assert once["clip_ratio/region_mean"] == 0.0
    # Mismatch is that of the policy when the step began, however many steps follow.
    assert metrics["off_policy/mismatch_kl"] == pytest.approx(once["off_policy/mismatch_kl"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputed_layers_have_the_same_gradient(dtype):
    batch = made_up_batch()
    kept, _ = gradients(tiny_learner(dtype=dtype), batch)
    learner = tiny_learner(dtype=dtype, gradient_checkpointing=True)
    calls = []
    learner.model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    again, _ = gradients(learner, batch)
    close(again, kept, 1e-6)
    assert len(calls) == 3  # forward, its recomputation, and the rows that are only measured


def test_bfloat16_gradient_is_near_float32():
    batch = made_up_batch()
    exact, _ = gradients(tiny_learner(), batch)
    rounded, _ = gradients(tiny_learner(dtype=torch.bfloat16), batch)
    a = torch.cat([g.flatten() for g in exact.values()])
    b = torch.cat([g.flatten() for g in rounded.values()])
    assert float(torch.cosine_similarity(a, b, dim=0)) > 0.99


@pytest.mark.parametrize("correction", ["none", "proximal", "tis"])
def test_of_several_optimizer_steps_one_is_skipped_and_again(correction):
    """Another learner comes to the same weights by the numbers alone, whatever its gradient is."""
    batch = made_up_batch()
    batch[-1].logprobs[0] = float("nan")
    options = {"num_minibatches": 2, "num_iterations": 2, "off_policy_correction": correction}
    learner, other = (tiny_learner(**options) for _ in "12")
    if correction == "proximal":  # mu has no part in the loss
        assert learner.train(batch, 0)["skipped_steps"] == 0
        return
    assert learner.train(batch, 0)["skipped_steps"] == 2
    assert (learner.version, learner.skipped.keys()) == (1, {1, 3})
    assert "gradient is not finite" in learner.skipped[1]
    batch[-1].logprobs[0] = batch[-1].logprobs[1]
    other.train(batch, 0, skip=tuple(learner.skipped))
    assert not other.skipped
    assert equal(learner.rows(), other.rows())


def rewarded(reward: float, **components: float) -> Sample:
    return Sample(0, [1], [2, 3], [0.0, 0.0], [0, 0], reward, False, components)


def test_each_reward_function_has_its_mean_and_deviation_over_what_it_applied_to():
    metrics = batch_metrics(
        [
            rewarded(1.5, right=1.0, short=0.5),
            rewarded(0.25, short=0.25),
            rewarded(0.0, right=0.0),
            rewarded(1.0, right=1.0, only=3.0),
        ]
    )
    expected = {
        "rewards/right/mean": np.mean([1.0, 0.0, 1.0]),
        "rewards/right/std": np.std([1.0, 0.0, 1.0], ddof=1),
        "rewards/short/mean": 0.375,
        "rewards/short/std": np.std([0.5, 0.25], ddof=1),
        "rewards/only/mean": 3.0,
        "rewards/only/std": 0.0,
        "reward": np.mean([1.5, 0.25, 0.0, 1.0]),
        "reward_std": np.std([1.5, 0.25, 0.0, 1.0], ddof=1),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert {name for name in metrics if "reward" in name} == set(expected)


def test_lengths_of_responses_that_ended_by_themselves():
    """0 where none did, as in TRL."""

    def of(length: int, truncated: bool) -> Sample:
        some = [0] * length
        return Sample(0, [1], some, [0.0] * length, some, 0.0, truncated)

    batch = [of(3, False), of(9, True), of(6, False)]
    for members, expected in ((batch, [4.5, 3, 6]), (batch[1:2], [0, 0, 0])):
        metrics = batch_metrics(members)
        names = [f"completions/{each}_terminated_length" for each in ("mean", "min", "max")]
        assert [metrics[name] for name in names] == expected
