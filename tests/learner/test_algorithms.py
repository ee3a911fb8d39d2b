"""An algorithm is a combination of parts; with each a batch's loss is that of the batch."""

import ast
import runpy
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

import rhymeflow
from rhymeflow.check import before_start
from rhymeflow.config import Config, LearnerConfig
from rhymeflow.config.algorithms import ALGORITHMS, PARTS
from rhymeflow.config.load import build_config, dump_config, parse_config, read_config
from rhymeflow.errors import UserError
from rhymeflow.learner.algorithms.advantages import (
    batch_advantages,
    group_advantages,
    shaped_rewards,
)
from rhymeflow.learner.algorithms.losses import check_parts
from rhymeflow.learner.algorithms.surrogates import RATIOS, SURROGATES
from rhymeflow.learner.packing import pack
from rhymeflow.learner.sample import Sample
from rhymeflow.models.logits import shaped
from tests.learner.builders import (
    close,
    gradients,
    learner_config,
    made_up_batch,
    rollout_config,
    tiny_learner,
    tiny_model,
)
from tests.learner.test_single import same_metrics
from tests.refused import refusal

SMALL = {"max_tokens_per_microbatch": 40, "logits_chunk_size": 3}
SEVERAL = {
    "num_minibatches": 2,
    "num_iterations": 2,
    "learning_rate": 0.02,
    "adam_epsilon": 1e-3,  # else AdamW takes a full step where a gradient is a rounding error
}
MASKS = {"seq_mean_k2": 2.0, "token_k1": 9.0, "veto": 1e-4}
SETTINGS = {
    **{name: {"algorithm": name, **SEVERAL} for name in ALGORITHMS},
    "gspo": {"algorithm": "gspo", "epsilon": 0.2, **SEVERAL},
    "gspo around pi_prox": {"algorithm": "gspo", "epsilon": 0.2, "off_policy_correction": "tis"},
    "gspo_token": {"algorithm": "gspo_token", "epsilon": 0.2, "beta": 0.1, **SEVERAL},
    "ppo": {
        **{"algorithm": "ppo", "beta": 0.2, "kl_in": "reward", "kl_estimator": "k1"},
        **{"critic_learning_rate": 0.02, **SEVERAL},
    },
    "sequence": {
        **{"off_policy_correction": "tis", "off_policy_level": "sequence"},
        **{"importance_sampling_cap": 1.1, **SEVERAL},
    },
    "masks": {"off_policy_masks": MASKS, "off_policy_correction": "proximal"},
    "entropy": {"entropy_coef": 0.1, "top_entropy_quantile": 0.3, **SEVERAL},
    "KL in the reward": {"beta": 0.2, "kl_in": "reward", "kl_estimator": "k1", **SEVERAL},
    "KL in the loss": {"beta": 0.2, "kl_estimator": "k2", **SEVERAL},
    "normalized": {
        **{"off_policy_correction": "tis", "normalize_importance_weights": True},
        "off_policy_mask_threshold": 0.05,
    },
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_batch_has_one_loss_however_it_is_cut(setting):
    batch = [with_components(sample) for sample in made_up_batch(turns=True)]
    whole, cut = tiny_learner(**SETTINGS[setting]), tiny_learner(**SETTINGS[setting], **SMALL)
    same_metrics_but_packing(cut.train(batch, 0), whole.train(batch, 0))
    close(cut.rows(), whole.rows(), 1e-4)
    start = tiny_learner().rows()
    assert any(not np.allclose(w.numpy(), start[n].numpy()) for n, w in whole.rows().items())


def with_components(sample: Sample) -> Sample:
    """Give it two rewards, the second by its length, of which there is none for some."""
    second = {} if sample.truncated else {"short": -float(len(sample.completion_ids))}
    given = {"first": sample.reward, **second}
    return replace(sample, components=given, weights={"first": 1.0, "short": 0.5})


def same_metrics_but_packing(found: dict, expected: dict) -> None:
    name = "packing/computed_share"
    same_metrics({**found, name: 0.0}, {**expected, name: 0.0}, rel=1e-3, abs=1e-5)


def test_masked_and_weighted_tokens_are_logged():
    metrics = tiny_learner(off_policy_masks={"veto": 0.9}).train(made_up_batch(), 0)
    assert metrics["off_policy/masked_share"] > 0.9
    weights = {"off_policy_correction": "tis", "normalize_importance_weights": True}
    metrics = tiny_learner(**weights).train(made_up_batch(), 0)
    assert metrics["off_policy/mean_weight"] == pytest.approx(1.0)


def test_the_entropys_gradient_is_that_of_autograd():
    """Of the mean entropy of a batch without advantages; some tokens are left out by top_k."""
    batch = [replace(sample, reward=0.0) for sample in made_up_batch()]
    rollout = rollout_config(temperature=0.7, top_k=9)
    options = {"rollout": rollout, "logits_chunk_size": 5, "entropy_coef": 0.5}
    learner = tiny_learner(**options)
    found, metrics = gradients(learner, batch)
    model, total = tiny_model(attn="eager"), 0.0
    tokens = sum(len(sample.completion_ids) for sample in batch)
    for sample in batch:
        ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
        start = len(sample.prompt_ids) - 1
        logits = model(ids).logits[0, start:-1]
        x = shaped(logits, temperature=0.7, top_k=9, top_p=1.0, keep_R=ids[0, start + 1 :])
        log_p = x.log_softmax(-1)
        log_p = log_p.where(log_p > -torch.inf, 0.0)
        total = total - (log_p.exp().where(log_p < 0, 0.0) * log_p).sum() / tokens
    (-0.5 * total).backward()
    close(found, {name: each.grad for name, each in model.named_parameters()}, 1e-3)
    assert metrics["loss"] == pytest.approx(-0.5 * float(total.detach()), rel=1e-4)


def test_only_the_most_uncertain_tokens_have_a_part():
    """Of one that has, the loss is the same; all are in the denominator."""
    batch, options = made_up_batch(), {"scale_rewards": "none", "advantage": "reward"}
    whole = tiny_learner(**options).train(batch, 0)["loss"]
    losses = [
        tiny_learner(top_entropy_quantile=share, **options).train(batch, 0)["loss"]
        for share in (1.0, 0.999, 0.4, 0.1)
    ]
    assert losses[0] == whole
    assert losses[1] == pytest.approx(whole, rel=0.1)
    assert abs(losses[0]) > abs(losses[2]) > abs(losses[3]) > 0


def test_rewards_are_bounded_and_long_responses_lose():
    config = learner_config(reward_clip=2.0, overlong_buffer=4, overlong_penalty=0.5)
    found = shaped_rewards([5.0, -9.0, 1.0, 1.0, 1.0], [1, 6, 7, 8, 10], config, 10)
    assert found.tolist() == [2.0, -2.0, 0.875, 0.75, 0.5]
    config = learner_config(advantage_clip=0.5)
    found = batch_advantages([0.0, 0.0, 1.0], [0, 0, 0], [1, 1, 1], config)
    assert found.values.tolist() == pytest.approx([-0.5, -0.5, 0.5])


def test_the_kl_of_a_response_is_taken_from_its_reward():
    batch = made_up_batch()
    config = {"beta": 0.2, "kl_in": "reward", "scale_rewards": "none", "kl_estimator": "k1"}
    learner = tiny_learner(**config)
    learner._reference.model.load_state_dict(tiny_model(seed=5).state_dict())
    rewards, means, kls = [], {}, []
    for sample in batch:
        (row,) = pack([sample], [0], 1000)
        kl = learner._policy.score(row)[0] - learner._reference.score(row)[0]
        kls += kl.tolist()
        rewards.append(sample.reward - 0.2 * float(kl.sum()))
        means.setdefault(sample.group, []).append(rewards[-1])
    expected = [r - np.mean(means[s.group]) for r, s in zip(rewards, batch, strict=True)]
    assert learner._advantages(batch).values == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert learner.train(batch, 0)["kl"] == pytest.approx(np.mean(kls), rel=1e-4)


@pytest.mark.parametrize(
    "options", [{"off_policy_correction": "none"}, SEVERAL], ids=["mu", "steps"]
)
def test_with_one_token_each_all_ratios_are_one_ratio(options):
    """Of responses of one token, also after steps that moved the policy."""
    batch = made_up_batch(longest=1)
    learners = {name: tiny_learner(ratio=name, epsilon=2.0, **options) for name in RATIOS}
    losses = {name: each.train(batch, 0)["loss"] for name, each in learners.items()}
    for name in ("sequence", "sequence_token", "product"):
        assert losses[name] == pytest.approx(losses["token"], rel=1e-4)
        close(learners[name].rows(), learners["token"].rows(), 1e-4)


def test_the_page_is_that_of_the_tables():
    root = Path(__file__).parents[2]
    page = runpy.run_path(str(root / "scripts" / "algorithms_page.py"))["page"]()
    assert (root / "docs" / "algorithms.md").read_text() == page, "the script writes it anew"


# -- names -----------------------------------------------------------------------------------------


def test_an_algorithm_sets_what_is_not_set():
    field = LearnerConfig.model_fields["algorithm"]
    assert set(get_args(field.annotation)) == set(ALGORITHMS)
    for name, each in ALGORITHMS.items():
        found = LearnerConfig(algorithm=name)
        assert {part: getattr(found, part) for part in PARTS} == dict(each)
        check_parts(found, 100)
    assert {each["ratio"] for each in ALGORITHMS.values()} == set(RATIOS)
    assert {each["surrogate"] for each in ALGORITHMS.values()} == set(SURROGATES)
    fields = LearnerConfig.model_fields
    assert {part: fields[part].default for part in PARTS} == dict(ALGORITHMS["dapo"])
    own = LearnerConfig(algorithm="gspo", epsilon=0.1, loss_type="dapo")
    assert (own.epsilon, own.epsilon_high, own.loss_type) == (0.1, 4e-4, "dapo")
    assert own.ratio == "sequence"


def test_another_algorithm_replaces_the_parts_of_a_runs_but_not_a_users():
    saved = dump_config(Config(learner=LearnerConfig(algorithm="gspo")))
    assert "epsilon: 0.0003" in saved, "a dry run prints the parts"
    assert parse_config(saved).learner.ratio == "sequence"
    given = {"learner.algorithm": "cispo"}
    for found in (
        parse_config(saved, given),
        build_config(given, parse_config(saved), where="here"),
        build_config(given, where="here"),
    ):
        assert found.learner == LearnerConfig(algorithm="cispo")
    users = parse_config("learner: {epsilon: 0.1}", {"learner.algorithm": "gmpo"})
    assert users.learner == LearnerConfig(algorithm="gmpo", epsilon=0.1)


TEACHER = {"distillation": {"teacher": "start", "reward_weight": 0.0}}
KL = {"beta": 0.1, "kl_in": "reward"}
OFF = {"off_policy_correction": "none"}


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("epsilon", {"algorithm": "sapo", "epsilon": 0.1}),
        ("epsilon_high", {"surrogate": "linear", "epsilon_high": 0.1}),
        ("delta", {"algorithm": "cispo", "delta": 9.0}),
        ("dual_clip", {"algorithm": "gmpo", "dual_clip": 3.0}),
        ("sapo_temperature_pos", {"sapo_temperature_pos": 2.0}),
        ("sapo_temperature_neg", {"algorithm": "ppo", "sapo_temperature_neg": 2.0}),
        ("use_bias_correction_kl", {"use_bias_correction_kl": False}),
        ("use_bias_correction_kl", {**KL, "use_bias_correction_kl": False}),
        ("kl_estimator", {**KL, "kl_estimator": "k3+"}),
        ("overlong_penalty", {"overlong_penalty": 0.5}),
        ("importance_sampling_cap", {**OFF, "importance_sampling_cap": 3.0}),
        ("importance_sampling_floor", {**OFF, "importance_sampling_floor": 0.1}),
        ("importance_sampling_floor", {"importance_sampling_floor": 2.0}),
        ("off_policy_level", {"off_policy_correction": "proximal", "off_policy_level": "sequence"}),
        ("normalize_importance_weights", {**OFF, "normalize_importance_weights": True}),
        ("advantage", {"algorithm": "rloo", "multi_objective_aggregation": "normalize_then_sum"}),
        ("scale_rewards", {"algorithm": "gdpo", "scale_rewards": "batch"}),
        ("reward_clip", {"algorithm": "gdpo", "reward_clip": 1.0}),
        ("overlong_buffer", {"algorithm": "gdpo", "overlong_buffer": 4}),
        ("kl_in", {"algorithm": "gdpo", **KL}),
        ("kl_in", {**TEACHER, **KL}),
        ("scale_rewards", {**TEACHER, "scale_rewards": "batch"}),
        ("advantage_clip", {**TEACHER, "advantage_clip": 1.0}),
        ("delta", {"delta": 1.28}),
    ],
)
def test_what_would_have_no_effect_is_refused_by_name(name, given):
    assert f"learner.{name}" in refusal(build_config, {"learner": given}, where="test")


def test_a_users_function_may_use_any_field():
    LearnerConfig(surrogate="mine.py:surrogate", delta=3.0, sapo_temperature_pos=2.0, epsilon=0.1)


def test_bounds_of_ratios_that_are_all_1_are_reported():
    for given, said in (
        ({}, ""),
        ({"algorithm": "gspo"}, ""),
        ({"epsilon_high": None}, ""),
        ({"epsilon": 0.1, "num_minibatches": 2}, ""),
        ({"epsilon": 0.1, "off_policy_correction": "none"}, ""),  # the default
        ({"epsilon": 0.1}, "learner.epsilon: without effect"),
        ({"epsilon": 0.1, "delta": 3.0}, "learner.epsilon, learner.delta: without effect"),
        ({"algorithm": "sapo", "sapo_temperature_pos": 2.0}, "learner.sapo_temperature_pos:"),
    ):
        found = learner_config(**{"off_policy_correction": "tis"} | given).bounds_without_effect
        assert found.startswith(said)
        assert bool(found) == bool(said)


@pytest.mark.parametrize("algorithm", ["rloo", "dr_grpo", "reinforce_plus_plus_baseline"])
def test_a_response_alone_in_its_group_is_compared_with_none(algorithm):
    given = {"learner.algorithm": algorithm, "rollout.num_generations": 1}
    assert "leaves no group to compare with" in refusal(build_config, given, where="test")


def test_nothing_branches_on_an_algorithms_name():
    """The name is read where it is translated into parts, and no code compares with it."""
    root, found = Path(rhymeflow.__file__).parent, []
    for path in sorted([*root.glob("learner/**/*.py"), *root.glob("config/*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            compared = [*ast.walk(node)] if isinstance(node, ast.Compare | ast.match_case) else []
            names = [n.value for n in compared if isinstance(n, ast.Constant)]
            if any(isinstance(name, str) and name in ALGORITHMS for name in names):
                found.append((path.name, node.lineno))
            if isinstance(node, ast.Attribute) and node.attr == "algorithm":
                found.append((path.name, "algorithm"))
    assert found == [("learner.py", "algorithm")]


# -- a user's own ----------------------------------------------------------------------------------

OWN = """
def advantage(rewards, lengths):
    return rewards - rewards.max()

def ratio(log_ratios, advantages, responses, config):
    return responses.mean(log_ratios).exp()

def surrogate(ratios, advantages, logprobs, config):
    return -ratios * advantages

def normalisation(length, max_completion_length):
    return length**-0.5 if length else 0.0, length**0.5

def unbounded(length, max_completion_length):
    return 1 / max(length, 1), float("inf")

def nothing(length, max_completion_length):
    return 1.0, 0.0

def of_long(length, max_completion_length):
    return float(length == 1), 1.0

def weight(length, max_completion_length):
    return 1 / length

def divides(length, max_completion_length):
    return 1 / length, 1.0

def few(ratios):
    return ratios

def raises(rewards, lengths):
    return rewards - baseline

def of_equals(rewards, lengths):
    return (rewards - rewards.mean()) / rewards.std()

def first(log_ratios, advantages, responses, config):
    return log_ratios[:1].exp()

def spread(log_ratios, advantages, responses, config):
    return responses.mean(log_ratios / (responses.sum(log_ratios.abs()) - log_ratios.abs()))

def one(ratios, advantages, logprobs, config):
    return float((ratios * advantages).detach().mean())

def constant(ratios, advantages, logprobs, config):
    return -ratios.detach() * advantages
"""


AS_GIVEN = {"advantage": "reward", "scale_rewards": "none"}


def test_a_users_functions_take_the_place_of_parts(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    own = {part: f"{file}:{part}" for part in ("advantage", "ratio", "surrogate")}
    batch = made_up_batch()
    found, _ = gradients(tiny_learner(**own, scale_rewards="none"), batch)
    named = {"ratio": "sequence", "surrogate": "linear", "advantage": own["advantage"]}
    close(found, gradients(tiny_learner(**named, scale_rewards="none"), batch)[0], 1e-6)
    assert any(float(each.abs().max()) > 0 for each in found.values())


@pytest.mark.parametrize("early", [0, 4])
def test_a_users_normalisation_weighs_responses(tmp_path, early):
    """By the root of their lengths: here each response's tokens have a part of the advantage."""
    (tmp_path / "mine.py").write_text(OWN)
    batch = made_up_batch()
    learner = tiny_learner(loss_type=f"{tmp_path / 'mine.py'}:normalisation", **AS_GIVEN)
    if early:
        learner.accumulate(batch[:early])
    found, _ = gradients(learner, batch[early:])
    roots = [len(each.completion_ids) ** 0.5 for each in batch]
    pairs = zip(batch, roots, strict=True)
    batch = [replace(each, reward=each.reward / root) for each, root in pairs]
    expected, _ = gradients(tiny_learner(loss_type="dr_grpo", **AS_GIVEN), batch)
    factor = len(batch) * rollout_config().max_completion_length / sum(roots)
    close(found, {name: each * factor for name, each in expected.items()}, 1e-5)


def test_a_users_advantages_are_one_number_for_each():
    for wrong in (lambda rewards, lengths: 1.0, lambda rewards, lengths: rewards / 0.0):
        with np.errstate(all="ignore"), pytest.raises(UserError, match="one finite number for"):
            group_advantages([0.0, 1.0], [0, 0], "none", wrong)


@pytest.mark.parametrize(
    ("field", "given", "said"),
    [
        ("ratio", "sequnce", 'learner.ratio: given "sequnce", allowed: token, product, sequence'),
        ("surrogate", "FILE:few", "cannot be called as f(ratios, advantages, logprobs, config)"),
        ("advantage", "FILE:advantge", "there is no 'advantge' in it; did you mean advantage?"),
        ("advantage", "no/such.py:f", "learner.advantage: no/such.py:f: there is no file"),
        ("advantage", "FILE:raises", "NameError: name 'baseline' is not defined (mine.py:33)"),
        ("advantage", "FILE:of_equals", "returned [nan, nan] for 2 rewards; give one finite"),
        ("ratio", "FILE:first", "mine.py:first returned size [1], should be a tensor of size [4]"),
        ("ratio", "FILE:spread", ", should be a finite number for each token"),
        ("surrogate", "FILE:one", "mine.py:one returned float "),
        ("surrogate", "FILE:constant", "returned losses without a gradient"),
        ("loss_type", "grop", "allowed: grpo, bnpo, dapo, dr_grpo, or a function of your own"),
        ("loss_type", "FILE:weight", "mine.py:weight returned float 0.0"),
        ("loss_type", "FILE:divides", "divides raised ZeroDivisionError: division by zero"),
        ("loss_type", "FILE:unbounded", "unbounded returned tuple (0."),
        ("loss_type", "FILE:nothing", "adds nothing to the divisor for any response of an optim"),
        ("loss_type", "FILE:of_long", "tokens the factors [0.0, 0.0, 1.0]; only that without"),
    ],
)
def test_what_is_no_part_is_said_before_a_run_begins(tmp_path, field, given, said):
    (tmp_path / "mine.py").write_text(OWN)
    spec = given.replace("FILE", str(tmp_path / "mine.py"))
    config = read_config("demo", {f"learner.{field}": spec})
    with np.errstate(all="ignore"), pytest.raises(UserError) as error:
        before_start(config)
    assert f"learner.{field}: " in str(error.value)
    assert said in str(error.value)
