"""Losses, gradients, masks and advantages equal those of TRL 1.16, verl and AReaL.

`oracle.json` has made-up inputs, and what the libraries' own functions computed of them in float64;
VESPO and DRO, which Rhymeflow has not, are a user's functions here. Each case is evaluated in whole
rows and in rows of one response, in chunks of tokens, as the learner does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rhymeflow.config import LearnerConfig
from rhymeflow.learner.algorithms import normalisations
from rhymeflow.learner.algorithms.advantages import ESTIMATORS, group_advantages
from rhymeflow.learner.algorithms.corrections import kept, off_policy_weight
from rhymeflow.learner.algorithms.gae import estimates, value_losses
from rhymeflow.learner.algorithms.losses import (
    TokenInputs,
    gradient,
    reference_kl,
    token_losses,
)
from rhymeflow.learner.algorithms.surrogates import Responses

ORACLE = json.loads((Path(__file__).parent / "oracle.json").read_text())
POLICY_LOSSES = ORACLE["policy_losses"]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-6}
SAME = ("epsilon", "epsilon_high", "delta", "beta", "use_bias_correction_kl")
"""Options of TRL's with our names."""
SLACK = {"areal": 2e-7, "verl/sapo": 1e-7, "verl/gmpo": 1e-8}
"""AReaL's weights are float32, and a temperature of SAPO's is here; verl's GMPO adds 1e-8 to a
count."""
OWN = "tests.learner.test_oracle."


def vespo(ratios: Tensor, advantages: Tensor, logprobs: Tensor, config: LearnerConfig) -> Tensor:
    log = ratios.detach().log()
    k = torch.where(advantages >= 0, 2.0, 3.0).to(log.dtype)
    rate = torch.where(advantages >= 0, 3.0, 2.0).to(log.dtype)
    return -(rate + k * log - rate * log.exp()).exp() * advantages * logprobs


def dro(ratios: Tensor, advantages: Tensor, logprobs: Tensor, config: LearnerConfig) -> Tensor:
    return -(logprobs * advantages - 0.5 * 0.1 * ratios.log().square())


def gpg(ratios: Tensor, advantages: Tensor, logprobs: Tensor, config: LearnerConfig) -> Tensor:
    return -logprobs * advantages


def fields_of_trl(hyper: dict[str, Any], kind: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"epsilon_high": None}
    fields |= {k: hyper[k] for k in SAME if k in hyper}
    match hyper.get("loss_type", kind):
        case "cispo":  # its bound is the ratio itself
            fields |= {"algorithm": "cispo", "epsilon_high": hyper["epsilon_high"] - 1}
        case "sapo" | "gmpo" | "rloo" as name:
            fields |= {"algorithm": name}
        case "vespo":
            fields |= {"ratio": "product", "surrogate": f"{OWN}vespo", "loss_type": "bnpo"}
        case "luspo":  # the sum over tokens, over responses; the case's longest has 10 of them
            fields |= {"loss_type": "dr_grpo"}
        case name:
            fields |= {"loss_type": name}
    if hyper.get("importance_sampling_level") == "sequence":
        fields |= {"ratio": "sequence"}
    if "is_mode" in hyper:
        level, action = hyper["is_mode"].split("_")
        fields |= {
            "off_policy_level": level,
            "off_policy_correction": {"truncate": "tis", "mask": "decoupled"}[action],
            "importance_sampling_cap": hyper["is_max"],
            "importance_sampling_floor": hyper.get("is_min"),
        }
    if "off_policy_mask_threshold" in hyper:
        fields |= {"off_policy_mask_threshold": hyper["off_policy_mask_threshold"]}
    return fields


def fields_of_verl(hyper: dict[str, Any], kind: str) -> dict[str, Any]:
    fields = {
        "epsilon": hyper.get("clip_ratio_low", 0.2),
        "epsilon_high": hyper.get("clip_ratio_high", 0.2),
        "dual_clip": hyper.get("clip_ratio_c", 3.0),
    }
    loss_types = {"token-mean": "bnpo", "seq-mean-token-mean": "grpo"}
    fields["loss_type"] = loss_types.get(hyper["loss_agg_mode"], "dr_grpo")
    match kind:
        case "gspo":
            fields |= {"algorithm": "gspo_token", "loss_type": "grpo", "dual_clip": None}
        case "sapo":
            fields = {"algorithm": kind, "loss_type": "grpo"}
        case "gmpo":
            fields |= {"algorithm": kind, "loss_type": "grpo", "dual_clip": None}
        case "cispo":
            fields |= {"algorithm": kind, "dual_clip": None}
        case "gpg" | "dro":
            fields |= {"surrogate": f"{OWN}{kind}"}
    if "rollout_is" in hyper:
        is_two_sided = isinstance(hyper["rollout_is_threshold"], str)
        fields |= {
            "off_policy_level": hyper["rollout_is"],
            "off_policy_correction": "decoupled" if is_two_sided else "tis",
            "importance_sampling_floor": 0.5 if is_two_sided else None,
            "normalize_importance_weights": hyper.get("batch_normalize", False),
        }
    return fields


def fields_of_areal(hyper: dict[str, Any], kind: str) -> dict[str, Any]:
    fields = {"loss_type": "bnpo", "dual_clip": hyper.get("c_clip")}
    if (chosen := hyper["rejection_sampling"]) is not None:
        is_sequence = chosen.get("level") == "sequence"
        fields |= {
            "off_policy_level": "geometric_mean" if is_sequence else "token",
            "off_policy_correction": "tis" if chosen.get("action") == "clamp" else "decoupled",
            "importance_sampling_cap": chosen["upper"],
            "importance_sampling_floor": chosen.get("lower"),
        }
    return fields


FIELDS = {"trl": fields_of_trl, "verl": fields_of_verl, "areal": fields_of_areal}


def config_of(case: dict[str, Any]) -> LearnerConfig:
    library, kind = case["name"].split("/")[:2]
    fields = FIELDS[library](case["hyper"], kind)
    return LearnerConfig.model_validate({"off_policy_correction": "proximal", **fields})


@cache
def table(name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    return {key: torch.tensor(x, dtype=dtype) for key, x in ORACLE["sets"][name].items()}


def inputs_of(case: dict[str, Any], config: LearnerConfig, dtype: torch.dtype, rows: Tensor):
    """Log-probabilities and inputs of the tokens in the loss of some responses."""
    values = table(case["inputs"], dtype)
    mask = values["mask"][rows].bool()
    counts = mask.sum(1).tolist()
    per_token = case["hyper"].get("per_token_advantages")
    advantage = values["advantages_BT"] if per_token else values["advantages"][:, None]
    weights = normalisations.weights(config.loss_type, counts, 0)
    spread = lambda x: x[rows].expand_as(mask)[mask]  # noqa: E731
    inputs = TokenInputs(
        advantage_R=spread(advantage),
        weight_R=torch.tensor(weights, dtype=dtype)[:, None].expand_as(mask)[mask],
        behaviour_R=spread(values["rollout_logp"]),
        proximal_R=spread(values["old_logp"]),
        reference_R=spread(values["ref_logp"]),
        responses=Responses([n for n in counts if n]),
    )
    return spread(values["logp"]), inputs, mask


def cut(config: LearnerConfig, logprob_R: Tensor, inputs: TokenInputs, size: int) -> Iterator:
    """The loss and gradient of chunks of a row, as the learner takes them."""
    whole = gradient(logprob_R, inputs, config) if config.needs_whole_responses else None
    for start in range(0, len(logprob_R), size):
        chunk = slice(start, start + size)
        found = whole[chunk] if whole is not None else None
        if found is None:
            found = gradient(logprob_R[chunk], inputs[chunk], config)
        yield found
    yield (token_losses(logprob_R, inputs, config) * inputs.weight_R).sum()


def scale_of(case: dict[str, Any], config: LearnerConfig) -> float:
    mask = table(case["inputs"], torch.float64)["mask"]
    lengths = mask.sum(1).int().tolist()
    longest, mode = 10, case["hyper"].get("loss_agg_mode", "")
    if mode.startswith("seq-mean-token-sum"):
        longest = mask.shape[1] if mode.endswith("norm") else 1
    if case["hyper"].get("loss_type") == "luspo":
        longest = 1
    (scale,) = normalisations.scales(config.loss_type, [lengths], longest)
    leaves_out = case["name"].startswith("verl") and "gmpo" not in case["name"]
    if leaves_out and config.loss_type in ("grpo", "dr_grpo"):
        scale *= len(lengths) / sum(map(bool, lengths))  # as docs/from-others.md says
    return scale


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float64", "float32"])
@pytest.mark.parametrize("together", [6, 1], ids=["one row", "rows of one"])
def test_policy_losses_and_their_gradients(dtype: torch.dtype, together: int) -> None:
    differing = []
    for case in POLICY_LOSSES:
        config, expected = config_of(case), torch.tensor(case["grad_logp"], dtype=dtype)
        mean = 1.0
        if config.normalize_importance_weights:
            _, inputs, _ = inputs_of(case, config, dtype, torch.arange(6))
            log_u_R = inputs.proximal_R - inputs.behaviour_R
            mean = float(off_policy_weight(log_u_R, config, inputs.responses).mean())
        loss, found = 0.0, torch.zeros_like(expected)
        for rows in torch.arange(6).split(together):
            logprob_R, inputs, mask = inputs_of(case, config, dtype, rows)
            inputs = TokenInputs(**{**vars(inputs), "mean_weight": mean})
            *gradients, part = cut(config, logprob_R, inputs, 3)
            part_of = torch.zeros(mask.shape, dtype=dtype)
            part_of[mask] = torch.cat(gradients) if gradients else torch.zeros(0, dtype=dtype)
            found[rows] = part_of
            loss += float(part)
        scale = scale_of(case, config)
        if case["name"] in ("trl/gmpo/masked_row", "trl/rloo/masked_row"):
            # A response without a token has ratio 1 there, which changes the value only.
            loss += float(-table("masked_row", dtype)["advantages"][2])
        own = [slack for name, slack in SLACK.items() if case["name"].startswith(name)]
        tolerance = max(TOLERANCE[dtype], *own, 0.0)
        error = max(abs(loss * scale - case["loss"]), float((found * scale - expected).abs().max()))
        if error > tolerance:
            differing.append((case["name"], error))
    assert differing == [], "\n".join(map(str, differing))


@pytest.mark.parametrize("case", ORACLE["rejection_masks"], ids=lambda case: case["name"])
def test_masks(case: dict[str, Any]) -> None:
    values, bound = table(case["inputs"], torch.float64), case["hyper"]["threshold"]
    bound = float(str(bound).rpartition("_")[2])  # the other one is its inverse
    config = LearnerConfig(off_policy_masks={case["hyper"]["rollout_rs"]: bound})
    mask = values["mask"].bool()
    log_u = (values["old_logp"] - values["rollout_logp"])[mask]
    found = torch.zeros(mask.shape)
    found[mask] = kept(log_u, config, Responses([n for n in mask.sum(1).tolist() if n])).float()
    assert torch.equal(found, torch.tensor(case["mask"]).float())


ADVANTAGES = {
    "verl/grpo": ("group_mean", "group"),
    "verl/dr_grpo": ("group_mean", "none"),
    "verl/rloo": ("leave_one_out", "none"),
    "verl/opo": ("length_weighted", "none"),
    "verl/grpo_passk": ("best_of_group", "group"),
    "verl/reinforce_plus_plus_baseline": ("group_mean", "tokens"),
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages(name: str) -> None:
    given = ORACLE["advantages"]["inputs"]
    mask = np.array(given["mask"])
    case = next(each for each in ORACLE["advantages"]["cases"] if each["name"] == name)
    estimator, scale = ADVANTAGES[name]
    found = group_advantages(
        given["rewards"], given["groups"], scale, ESTIMATORS[estimator], mask.sum(1).tolist()
    ).values
    # verl adds 1e-6 to a group's deviation, and 1e-8 to others; Rhymeflow 1e-4, as TRL does.
    tolerance = 5e-4 if scale == "group" else 1e-8
    np.testing.assert_allclose(found[:, None] * mask, case["advantages"], atol=tolerance)


OF_TOKENS = [case for case in ORACLE["advantages"]["cases"] if "gamma" in case["hyper"]]


@pytest.mark.parametrize("case", OF_TOKENS, ids=lambda case: case["name"])
def test_advantages_and_returns_of_tokens(case: dict[str, Any]) -> None:
    """Row 3 has an observation in the middle."""
    given, hyper = ORACLE["advantages"]["inputs"], case["hyper"]
    mask = np.array(given["mask"], dtype=bool)
    config = LearnerConfig(algorithm="reinforce_plus_plus", gamma=hyper["gamma"])
    if "lam" in hyper:
        config = LearnerConfig(algorithm="ppo", **{name: hyper[name] for name in ("gamma", "lam")})
    names = ("token_rewards", "values")
    rewards, values = (
        [np.array(x)[m] for x, m in zip(given[name], mask, strict=True)] for name in names
    )
    if not config.has_critic:
        values = [*map(np.zeros_like, values)]
    found = estimates(rewards, values, config, np.arange(len(values)))
    for name in ("advantages", "returns"):
        expected = np.array(case[name])[mask]
        np.testing.assert_allclose(np.concatenate(getattr(found, name)), expected, atol=1e-9)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float64", "float32"])
@pytest.mark.parametrize("case", ORACLE["value_losses"], ids=lambda case: case["name"])
def test_losses_of_values(case: dict[str, Any], dtype: torch.dtype) -> None:
    given, hyper = ORACLE["advantages"]["inputs"], case["hyper"]
    mask = torch.tensor(given["mask"]).bool()
    counts = mask.sum(1).tolist()
    loss_type = {"token-mean": "bnpo", "seq-mean-token-mean": "grpo"}[hyper["loss_agg_mode"]]
    config = LearnerConfig(algorithm="ppo", cliprange_value=hyper["cliprange_value"])
    value, old, due = (
        torch.tensor(x, dtype=dtype) for x in (case["vpreds"], given["values"], case["returns"])
    )
    value.requires_grad_()
    loss_R, is_clipped_R = value_losses(value[mask], old[mask], due[mask], config)
    weight = torch.tensor(normalisations.weights(loss_type, counts, 6), dtype=dtype)
    weight_R = weight[:, None].expand_as(mask)[mask]
    (scale,) = normalisations.scales(loss_type, [counts], 6)
    loss = (loss_R * weight_R).sum() * scale
    loss.backward()
    # verl adds 1e-8 to a response's count of tokens.
    near = {"atol": max(TOLERANCE[dtype], 2e-9 * (loss_type == "grpo")), "rtol": 0}
    torch.testing.assert_close(loss.detach(), torch.tensor(case["loss"], dtype=dtype), **near)
    torch.testing.assert_close(value.grad, torch.tensor(case["grad"], dtype=dtype), **near)
    if loss_type == "bnpo":
        assert float(is_clipped_R.double().mean()) == pytest.approx(case["clipfrac"], abs=1e-6)


@pytest.mark.parametrize("case", ORACLE["kl"], ids=lambda case: case["name"])
def test_estimators_of_the_kl(case: dict[str, Any]) -> None:
    kind = case["hyper"]["kl_penalty"]
    if kind == "abs":  # has no mean that is a divergence
        return
    values = table(case["inputs"], torch.float64)
    mask = values["mask"].bool()
    config = LearnerConfig(kl_estimator=kind, use_bias_correction_kl=False, beta=1.0)
    logprob, zero = values["logp"].clone().requires_grad_(), torch.zeros(int(mask.sum()))
    inputs = TokenInputs(zero, zero, zero, reference_R=values["ref_logp"][mask])
    loss = reference_kl(logprob[mask], inputs, config).mean()
    loss.backward()
    assert float(loss) == pytest.approx(case["loss"], abs=1e-9)
    expected = torch.tensor(case["grad_logp"], dtype=torch.float64)
    torch.testing.assert_close(logprob.grad, expected, atol=1e-9, rtol=0)
