"""What is learnt from a teacher: TRL's and verl's divergences, of one batch however it is cut."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rhymeflow.config import DistillationConfig
from rhymeflow.learner.algorithms.divergences import divergence
from rhymeflow.learner.learner import Learner
from rhymeflow.learner.logprobs import TokenScorer
from rhymeflow.learner.packing import empty_row, pack
from rhymeflow.learner.ranks import ALONE
from rhymeflow.learner.sample import Sample
from rhymeflow.learner.teacher import ServedTeacher
from tests.learner import rank_jobs
from tests.learner.builders import (
    VOCAB,
    close,
    gradients,
    learner_config,
    made_up_batch,
    rollout_config,
    tiny_model,
)
from tests.learner.rank_jobs import on_ranks
from tests.learner.test_algorithms import same_metrics_but_packing
from tests.learner.test_logprobs import _Largest
from tests.openai_servers import KEY, Server, serving
from tests.refused import refusal

ORACLE = json.loads((Path(__file__).parent / "oracle.json").read_text())["distillation"]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-6}


def config_of(hyper: dict[str, Any]) -> DistillationConfig:
    if "topk" in hyper:
        return DistillationConfig(
            teacher="some/model", mode="topk_logits", topk=hyper["topk"], jsd_beta=0, add_tail=False
        )
    return DistillationConfig(teacher="some/model", mode="full_logits", jsd_beta=hyper["beta"])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", ORACLE["cases"], ids=lambda case: case["name"])
def test_divergences_and_their_gradients_are_those_of_trl_and_verl(case, dtype):
    inputs, hyper = ORACLE["inputs"], case["hyper"]
    temperature = hyper.get("temperature", 1.0)
    in_loss = torch.tensor(inputs["labels"]) != -100
    names = "student_logits", "teacher_logits"
    x, y = (torch.tensor(inputs[name], dtype=dtype)[in_loss] / temperature for name in names)
    found, gradient = divergence(x, y, config_of(hyper))
    # verl computed in float32
    tolerance = max(TOLERANCE[dtype], 2e-7 if case["source"].startswith("verl") else 0.0)
    assert float(found.mean()) == pytest.approx(case["loss"], abs=tolerance)
    expected = torch.tensor(case["grad_student_logits"], dtype=dtype)[in_loss]
    gradient = gradient / (temperature * len(found))
    torch.testing.assert_close(gradient, expected, atol=tolerance, rtol=0)


def test_extreme_logits_leave_the_divergence_finite():
    x, y = torch.zeros(2, 3, 5)
    x[:, 0], y[:, 1] = 300.0, 300.0
    y[2, 4] = -torch.inf
    for mode, beta, topk in (("full_logits", 0.5, 1), ("topk_logits", 0.0, 2)):
        given = {"topk": topk} if mode == "topk_logits" else {}
        config = DistillationConfig(teacher="a/b", mode=mode, jsd_beta=beta, **given)
        found, gradient = divergence(x.clone(), y.clone(), config)
        assert found.isfinite().all()
        assert gradient.isfinite().all()


# -- the learner -----------------------------------------------------------------------------------

PLAIN = {"off_policy_correction": "proximal", "loss_type": "bnpo", "max_grad_norm": None}
SMALL = {"max_tokens_per_microbatch": 40, "logits_chunk_size": 3}


def batch_for(teacher: str, **options: Any) -> list:
    """Samples; the policy as its own teacher reads other prompts."""
    batch = made_up_batch(turns=True, **options)
    if teacher != "policy":
        return batch
    return [replace(s, teacher_prompt_ids=[*s.prompt_ids, 3 + s.group, 4]) for s in batch]


def a_learner(distillation: dict[str, Any], *, temperature: float = 1.0, **changes: Any) -> Learner:
    given = {"prompt": "told"} if distillation["teacher"] == "policy" else {}
    config = learner_config(**changes, distillation={**given, **distillation})
    rollout = rollout_config(temperature=temperature)
    taught = {"teacher": rank_jobs.teacher()} if "/" in distillation["teacher"] else {}
    return Learner(tiny_model(), None, config, rollout, torch.float32, **taught)


def log_softmaxes(model, sample, prompt: list[int], temperature: float, size: int):
    """The distributions of the sampled tokens by the model's own forward."""
    ids = torch.tensor([[*prompt, *sample.completion_ids]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1, :size] / temperature
    is_sampled = ~torch.tensor(sample.observed or [False] * len(sample.completion_ids))
    return logits.log_softmax(-1)[is_sampled]


def compared(p: torch.Tensor, q: torch.Tensor, distillation: dict[str, Any]) -> torch.Tensor:
    """The generalised Jensen-Shannon divergence of log-probabilities, as its formula says."""
    beta = distillation.get("jsd_beta", 1.0)
    if distillation["mode"] == "topk_logits":
        chosen = q.topk(distillation["topk"]).indices
        p, q = p.gather(1, chosen), q.gather(1, chosen)
        if distillation.get("add_tail", True):
            p, q = (torch.cat([x, (1 - x.exp().sum(1, keepdim=True)).log()], 1) for x in (p, q))

    def kl(a, b):
        return (a.exp() * (a - b)).sum(1)

    if beta in (0.0, 1.0):
        return kl(q, p) if beta == 0.0 else kl(p, q)
    mixture = ((1 - beta) * p.exp() + beta * q.exp()).log()
    return beta * kl(q, mixture) + (1 - beta) * kl(p, mixture)


CASES = {
    "forward": {"teacher": "a/model", "mode": "full_logits", "jsd_beta": 0.0, "weight": 2.0},
    "between": {"teacher": "policy", "mode": "full_logits", "jsd_beta": 0.3},
    "reverse": {"teacher": "start", "mode": "full_logits", "jsd_beta": 1.0},
    "likeliest": {"teacher": "a/model", "mode": "topk_logits", "topk": 4, "jsd_beta": 0.3},
    "likeliest, reverse": {"teacher": "policy", "mode": "topk_logits", "topk": 1},
    "verl's": {
        "teacher": "a/model", "mode": "topk_logits", "topk": 4, "jsd_beta": 0.0, "add_tail": False
    },
    "sampled tokens": {"teacher": "a/model", "weight": 0.5},
    "sampled tokens, told": {"teacher": "policy"},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_the_formula(case: str):
    """With a teacher of more tokens, another prompt before the same tokens, a temperature."""
    distillation = {**CASES[case], "reward_weight": 0.0}
    batch, temperature = batch_for(distillation["teacher"]), 0.7
    learner = a_learner(distillation, temperature=temperature, **PLAIN, **SMALL)
    if distillation["teacher"] == "start":  # and the policy has moved away
        learner.train(made_up_batch(seed=9), 0)
    student = tiny_model(attn="eager")
    student.load_state_dict(learner.model.state_dict())
    others = {"a/model": rank_jobs.teacher(attn="eager"), "policy": copy.deepcopy(student)}
    teacher = others.get(distillation["teacher"], tiny_model(attn="eager")).double()
    student.double()
    total, count, weight = 0.0, 0, distillation.get("weight", 1.0)
    how = temperature, VOCAB if "mode" in distillation else VOCAB + 6
    for sample in batch:
        p = log_softmaxes(student, sample, sample.prompt_ids, *how)
        with torch.no_grad():
            prompt = sample.teacher_prompt_ids or sample.prompt_ids
            q = log_softmaxes(teacher, sample, prompt, *how)
        if "mode" in distillation:
            terms = compared(p, q, distillation)
        else:
            tokens = torch.from_numpy(sample.sampled(sample.completion_ids))[:, None]
            own, others_ = p.gather(1, tokens), q.gather(1, tokens)
            terms = -(others_ - own).detach() * (own - own.detach()).exp()
        total, count = total + weight * terms.sum(), count + len(p)
    total = total / count
    total.backward()
    expected = float(total.detach())
    found, metrics = gradients(learner, batch)
    assert metrics["loss"] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    close(found, {name: each.grad for name, each in student.named_parameters()}, 1e-3)
    if "mode" in distillation:
        assert metrics["distillation/divergence"] == pytest.approx(expected / weight, rel=1e-4)


@pytest.mark.parametrize("case", ["between", "likeliest", "sampled tokens, told"])
def test_a_batch_has_one_loss_however_it_is_cut_and_accumulated(case: str):
    several = {"num_minibatches": 2, "num_iterations": 2, "learning_rate": 0.02}
    several |= {"adam_epsilon": 1e-3, "entropy_coef": 0.1, "beta": 0.1}
    batch = batch_for(CASES[case]["teacher"])
    whole, cut = a_learner(CASES[case], **several), a_learner(CASES[case], **several, **SMALL)
    same_metrics_but_packing(cut.train(batch, 0), whole.train(batch, 0))
    close(cut.rows(), whole.rows(), 1e-4)
    whole, early = (a_learner(CASES[case], adam_epsilon=1e-3) for _ in "12")
    early.accumulate(batch[:4])
    early.accumulate(batch[4:12])
    same_metrics_but_packing(early.train(batch[12:], 0), whole.train(batch, 0))
    close(early.rows(), whole.rows(), 1e-4)


@pytest.mark.parametrize("algorithm", ["dapo", "ppo"])
@pytest.mark.parametrize("mode", ["sampled_token", "full_logits"])
def test_rewards_and_teacher_add_up(algorithm: str, mode: str):
    """The gradient of both is the sum of the gradients of each, with a critic as well."""
    batch, given = made_up_batch(), {**PLAIN, "algorithm": algorithm}
    plain = learner_config(**given)
    rewards = Learner(tiny_model(), None, plain, rollout_config(), torch.float32)
    weights = {"teacher": "a/model", "weight": 0.5, "mode": mode}
    teacher = a_learner({**weights, "reward_weight": 0.0}, **given)
    both = a_learner({**weights, "reward_weight": 3.0}, **given)
    of_rewards, of_teacher, found = (gradients(x, batch)[0] for x in (rewards, teacher, both))
    assert any(float(each.abs().max()) > 0.0 for each in of_rewards.values())
    close(found, {name: 3.0 * of_rewards[name] + of_teacher[name] for name in found}, 1e-4)


def test_ranks_learn_from_a_teacher_as_one_does():
    cases = [CASES[name] for name in ("between", "likeliest", "sampled tokens")]
    given = [{"prompt": "told", **c} if c["teacher"] == "policy" else c for c in cases]
    batches = [batch_for(each["teacher"]) for each in given]
    found, _ = on_ranks(2, rank_jobs.learn, given, batches)
    for one, other in zip(found, rank_jobs.learn(ALONE, given, batches), strict=True):
        assert one[0] == pytest.approx(other[0], rel=1e-5, abs=1e-5)
        assert one[1].keys() == other[1].keys()
        for name, value in other[1].items():
            assert float((one[1][name] - value).abs().max()) < 1e-5, name


def test_tokens_times_vocabulary_never_exists():
    student, teacher = tiny_model(), tiny_model(seed=5)
    for model in (student, teacher):
        model.resize_token_embeddings(1000)
        model.requires_grad_(True)
    batch = made_up_batch(members=8)
    (row,) = pack(batch, range(len(batch)), 10**6)
    assert len(row.targets_R) > 250
    scorer = TokenScorer(student, rollout_config(), chunk_size=50)
    with torch.no_grad():
        hidden_RD = TokenScorer(teacher, rollout_config(), 50).hidden(row)
    head = teacher.get_output_embeddings()
    for given in ({"mode": "full_logits", "jsd_beta": 0.5}, {"mode": "topk_logits", "topk": 9}):
        config = DistillationConfig(teacher="a/b", **given)

        def gradient_of(chunk, x_CV, config=config):
            return divergence(x_CV, head(hidden_RD[chunk]).detach(), config)[1]

        with _Largest() as largest:
            scorer.backward(row, lambda x, _: x.sum(), None, gradient_of)
        assert largest.elements == max(50 * 1000, 1000 * 32)


# -- a server --------------------------------------------------------------------------------------


def prompt_logprobs(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """A token's log-probability is minus its place and a hundredth of itself."""
    said = [
        {str(token): {"logprob": -i - token / 100}, "999": {"logprob": -0.5}}
        for i, token in enumerate(body["prompt"])
    ]
    server.spoil(said)
    return {"prompt_logprobs": [None, *said[1:]]}


@pytest.fixture
def server(monkeypatch):
    with serving(monkeypatch, prompt_logprobs) as made:
        yield made


def asked_of(server: Server, rows: list, **options: Any) -> list[torch.Tensor]:
    config = DistillationConfig(teacher=server.url, **options)
    return ServedTeacher(config, torch.device("cpu")).scores(rows)


def test_a_server_says_how_likely_the_sampled_tokens_are(server):
    """The last token too, unless it is observed; none of an empty row."""
    batch, server.seconds = made_up_batch(turns=True), 0.01
    rows = [*pack(batch, range(len(batch)), 60), empty_row()]
    *found, nothing = asked_of(server, rows, concurrency=3, server_model="big")
    for row, found_R in zip(rows, found, strict=False):
        expected = [
            -len(batch[i].prompt_ids) - place - token / 100
            for i in row.members
            for place, token in enumerate(batch[i].completion_ids)
            if not (batch[i].observed and batch[i].observed[place])
        ]
        torch.testing.assert_close(found_R, torch.tensor(expected))
    assert torch.equal(nothing, torch.zeros(1))
    assert server.most_at_once == 3
    assert len(server.asked) == len(batch)
    path, key, body = server.asked[0]
    assert (path, key) == ("/v1/completions", f"Bearer {KEY}")
    assert (body["model"], body["max_tokens"], body["prompt_logprobs"]) == ("big", 1, 1)


@pytest.mark.parametrize(
    ("errors", "spoil", "problem", "asked"),
    [
        ([503, 429], None, None, 3),
        ([401] * 9, None, "HTTP 401", 1),
        ([500] * 9, None, "HTTP 500", 3),
        ([], lambda said: said[2].clear(), "no prompt_logprobs of token 4 at place 2", 1),
        ([], lambda said: said.pop(), "no prompt_logprobs of token 4 at place 2", 1),
        ([], lambda said: said[2].update({"4": {"logprob": None}}), "has None as the log", 1),
    ],
)
def test_what_is_no_log_probability_is_an_error_without_the_key(
    server, errors, spoil, problem, asked
):
    server.errors, server.spoil = errors, spoil or server.spoil
    rows = pack([Sample(0, [7], [5, 4], [0.0] * 2, [0] * 2, 0.0, False)], [0], 60)
    if problem is None:
        (found_R,) = asked_of(server, rows, retries=2)
        torch.testing.assert_close(found_R, torch.tensor([-1.05, -2.04]))
    else:
        said = refusal(asked_of, server, rows, retries=2)
        assert said.startswith(f"learner.distillation.teacher = '{server.url}': ")
        assert problem in said
        assert KEY not in said
    assert len(server.asked) == asked
