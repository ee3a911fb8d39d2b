"""PPO's critic: values, advantages, gradients by a slow formula; steps, checkpoints, refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rhymeflow import memory
from rhymeflow.config import Config, LearnerConfig
from rhymeflow.config.load import build_config
from rhymeflow.errors import UserError
from rhymeflow.learner.algorithms.gae import Estimates
from rhymeflow.learner.learner import Learner
from rhymeflow.learner.packing import pack
from rhymeflow.runtime.resume_options import check_change
from rhymeflow.store.checkpoint_dirs import CheckpointDir
from tests.learner.builders import close, copied, equal, made_up_batch, tiny_learner, tiny_model
from tests.refused import refusal


def ppo(*, dtype: torch.dtype = torch.float32, seed: int | None = None, **changes) -> Learner:
    """`seed`: that of a head which is not 0."""
    learner = tiny_learner(dtype=dtype, **{"algorithm": "ppo", **changes})
    if seed is not None:
        torch.manual_seed(seed)
        torch.nn.init.normal_(head_of(learner), std=0.3)
    return learner


def head_of(learner: Learner) -> torch.Tensor:
    return critics(learner)["lm_head.weight"]


def critics(learner: Learner) -> dict[str, torch.Tensor]:
    return learner._critic.optimizer._parameters


def test_values_advantages_and_gradients_are_those_of_a_slow_formula() -> None:
    """Of plain transformers with eager attention, sample by sample; a third of tokens observed."""
    batch, gamma, lam = made_up_batch(turns=True), 0.9, 0.8
    learner = ppo(seed=1, gamma=gamma, lam=lam, cliprange_value=None, scale_rewards="none")
    critic, body = learner._critic, tiny_model(attn="eager")
    head = head_of(learner).detach().clone().requires_grad_()
    values, advantages, total = [], [], 0.0
    tokens = sum(sample.num_sampled for sample in batch)
    for sample in batch:
        ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
        hidden = body.model(ids).last_hidden_state[0, len(sample.prompt_ids) - 1 : -1]
        kept = ~torch.tensor(sample.observed)
        value = (hidden @ head[0])[kept]
        v = [*value.tolist(), 0.0]
        deltas = [gamma * v[t + 1] - v[t] for t in range(len(value))]
        deltas[-1] += sample.reward
        powers = [(gamma * lam) ** n for n in range(len(value))]
        found = [np.dot(powers[: len(value) - t], deltas[t:]) for t in range(len(value))]
        advantages.append(found)
        values.append(v[:-1])
        due = torch.tensor(found) + value.detach()
        total = total + 0.5 * (value - due).square().sum() / tokens
    of_tokens = learner._advantages(batch).of_tokens
    for each, expected in zip(of_tokens, advantages, strict=True):
        np.testing.assert_allclose(each, expected, atol=1e-5)
    for each, expected in zip(critic._batch.values, values, strict=True):
        np.testing.assert_allclose(each, expected, atol=1e-5)
    total.backward()
    taken = {}
    critic.optimizer.apply = lambda rate: taken.update(
        {n: m.grad / critic.optimizer._divisor for n, m in critic.optimizer._masters.items()}
    )
    metrics = learner.train(batch, 0)
    norm = max(metrics["value/grad_norm"], 1.0)  # it is clipped at 1
    expected = {n: each.grad / norm for n, each in body.named_parameters() if n in taken}
    close(taken, {**expected, "lm_head.weight": head.grad / norm}, 1e-3)
    assert metrics["value/loss"] == pytest.approx(total.item(), rel=1e-4)
    assert metrics["value/clip_ratio"] == 0.0


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce_plus_plus"])
def test_the_kl_of_a_token_is_taken_from_its_own_reward(algorithm: str) -> None:
    """While values are 0, or without any, an advantage is of all rewards from there on."""
    given = {"beta": 0.2, "kl_in": "reward", "kl_estimator": "k1", "gamma": 0.9}
    more = {"lam": 1.0} if algorithm == "ppo" else {}
    learner, batch = tiny_learner(algorithm=algorithm, **given, **more), made_up_batch()
    learner._reference.model.load_state_dict(tiny_model(seed=5).state_dict())
    all_due = []
    for sample in batch:
        (row,) = pack([sample], [0], 1000)
        kl = learner._policy.score(row)[0] - learner._reference.score(row)[0]
        rewards = (-0.2 * kl).tolist()
        rewards[-1] += sample.reward
        due = [sum(0.9**n * r for n, r in enumerate(rewards[t:])) for t in range(len(rewards))]
        all_due.append(due)
    flat = np.concatenate(all_due)
    found = learner._advantages(batch)
    for each, due in zip(found.of_tokens, all_due, strict=True):
        np.testing.assert_allclose(each, (due - flat.mean()) / flat.std(ddof=1), atol=1e-4)
    assert found.frac_zero_std == 0.0


def test_explained_variance() -> None:
    def of(*values: float) -> float:
        returns = [np.array([0.0, 1.0]), np.array([2.0])]
        given = [np.array(values[:2]), np.array(values[2:])]
        return Estimates(given, returns, []).metrics()["value/explained_variance"]

    assert of(0.0, 0.0, 0.0) == of(1.0, 1.0, 1.0) == 0.0
    assert of(0.0, 1.0, 2.0) == of(5.0, 6.0, 7.0) == 1.0
    assert of(0.0, 0.5, 1.0) == pytest.approx(0.75)
    assert of(2.0, 1.0, 0.0) == pytest.approx(-3.0)


def test_a_critic_warms_up_alone_and_learns_the_returns() -> None:
    """The policy does not change meanwhile, then both learn; the critic forgets no step."""
    learner = ppo(critic_warmup_steps=25, critic_learning_rate=3e-3, cliprange_value=None, lam=1.0)
    batch, begun = made_up_batch(), copied(learner.rows())
    rows = [learner.train(batch, step) for step in range(25)]
    assert equal(begun, learner.rows())
    assert learner._optimizer.num_steps == 0
    assert learner._critic.optimizer.num_steps == learner.version == 25
    assert rows[0]["value/mean"] == rows[0]["value/explained_variance"] == 0.0
    assert rows[-1]["value/explained_variance"] > 0.5
    assert rows[-1]["value/loss"] < 0.5 * rows[0]["value/loss"]
    assert {row["grad_norm"] for row in rows} == {0.0}
    critics, passes = learner.charged["train_token"], learner.charged["measure_token"]
    assert passes == 2 * critics > 0, "the policy and the critic's values have no backward pass"
    assert learner.train(batch, 25)["grad_norm"] > 0.0
    assert not equal(begun, learner.rows())


def test_values_move_no_further_than_the_clip_in_a_batch() -> None:
    learner = ppo(num_iterations=8, critic_learning_rate=0.02, cliprange_value=0.01)
    metrics = learner.train(made_up_batch(), 0)
    assert 0.2 < metrics["value/clip_ratio"] < 1.0
    free = ppo(num_iterations=8, critic_learning_rate=0.02, cliprange_value=None)
    assert free.train(made_up_batch(), 0)["value/loss"] < metrics["value/loss"]


@pytest.mark.parametrize("whose", ["policy", "critic"])
def test_a_gradient_that_is_not_finite_lets_neither_step(whose: str) -> None:
    batch, learner = made_up_batch(), ppo(seed=1)
    of_policy, of_critic = copied(learner.rows()), copied(critics(learner))
    if whose == "policy":
        batch[-1].logprobs[0] = float("nan")
    else:  # of which the square is too large for a float32
        object.__setattr__(batch[-1], "reward", 1e30)
    assert learner.train(batch, 0)["skipped_steps"] == 1
    assert ("of the critic: " in learner.skipped[0]) == (whose == "critic")
    assert equal(of_policy, learner.rows())
    assert equal(of_critic, critics(learner))
    assert learner.train(made_up_batch(), 1)["skipped_steps"] == 0
    again = ppo(seed=1)
    again.train(made_up_batch(), 0, skip=(0,))
    assert equal(of_critic, critics(again))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_has_it(tmp_path: Path, dtype: torch.dtype) -> None:
    options = {"critic_warmup_steps": 1, "num_minibatches": 2, "gradient_checkpointing": True}
    learner, other = (ppo(dtype=dtype, **options) for _ in "12")
    for step in range(2):
        learner.train(made_up_batch(seed=step), step)
    learner.snapshot().write(CheckpointDir(tmp_path / "step-2"))
    assert other.restore(CheckpointDir(tmp_path / "step-2")) == 2
    assert equal(critics(learner), critics(other))
    found, expected = (each.train(made_up_batch(seed=2), 2) for each in (other, learner))
    assert {**found, "step_time": 0.0} == {**expected, "step_time": 0.0}
    assert equal(critics(learner), critics(other))
    assert equal(learner.rows(), other.rows())
    tiny_learner(dtype=dtype).snapshot().write(CheckpointDir(tmp_path / "step-0"))
    with pytest.raises(UserError, match="cannot be read"):  # there is no critic in it
        other.restore(CheckpointDir(tmp_path / "step-0"))


@pytest.mark.parametrize("tied", [True, False])
def test_the_plan_counts_its_memory(tied: bool) -> None:
    model = tiny_model(tied=tied)
    learner = ppo(model=model)
    config = build_config({"algorithm": "ppo"}, where="test")
    size = memory.model_of(model.config, torch.bfloat16, "cpu")
    assert size.num_of_critic == learner.num_of_critic
    more = {part.what.split(":")[0]: part for part in memory.of_optimizer(config, size)}
    assert more["critic"].num_bytes == 16 * learner.num_of_critic
    few, many = (memory.total(memory.of_rank(c, size, 10)) for c in (Config(), config))
    assert many - few == 2 * learner.num_of_critic


# -- what does not go with it ----------------------------------------------------------------------

TOGETHER = {
    "adapter": ({"model.lora.rank": 4}, "model.lora: not with learner.advantage = 'gae' yet"),
    "early": (
        {"accumulate_early": True, "scale_rewards": "none"},
        "with learner.advantage = 'gae' the learner needs",
    ),
    "group": ({"scale_rewards": "group"}, "compares no rewards, as 'group' does"),
    "a teacher alone": (
        {"learner.distillation.teacher": "start", "reward_weight": 0.0},
        "learner.advantage = 'gae': a critic judges rewards, and with a teacher alone",
    ),
    "several": (
        {"multi_objective_aggregation": "normalize_then_sum"},
        "compares no rewards, as 'normalize_then_sum' does",
    ),
}


@pytest.mark.parametrize("what", TOGETHER)
def test_what_does_not_go_together(what: str) -> None:
    given, said = TOGETHER[what]
    with pytest.raises(UserError) as error:
        build_config({"algorithm": "ppo", **given}, where="test")
    assert said in str(error.value)


def test_one_response_to_a_prompt_is_enough() -> None:
    given = {"algorithm": "ppo", "num_generations": 1}
    assert build_config(given, where="test").learner.has_critic


def test_what_only_a_critic_uses_is_refused_without_one() -> None:
    for algorithm in ("ppo", "reinforce_plus_plus"):
        LearnerConfig(algorithm=algorithm, gamma=0.9)
    for given, without in (
        ({"gamma": 0.9}, "learner.advantage: gae, or reward with learner.scale_rewards: tokens"),
        ({"lam": 0.9, "algorithm": "reinforce_plus_plus"}, "learner.advantage: gae"),
        ({"kl_in": "reward"}, "learner.beta above 0"),
        ({"muon_momentum": 0.9}, "learner.optimizer: muon"),
        ({"min_lr_rate": 0.1}, "learner.lr_scheduler_type: cosine"),
    ):
        said = refusal(build_config, given, where="test")
        assert f"learner.{next(iter(given))}: has no effect without {without}" in said


def test_a_resumed_run_has_a_critic_if_it_had_one() -> None:
    runs = [build_config({"algorithm": name}, where="test") for name in ("ppo", "grpo")]
    with pytest.raises(UserError, match=r"learner\.advantage: cannot be changed from .*gae"):
        check_change(*runs, 0)
    check_change(runs[0], runs[0].changed(learner={"critic_learning_rate": 0.1}), 0)
