"""Tiny models and made-up batches that the learner's tests share."""

import random
from collections.abc import Mapping

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rhymeflow.config import LearnerConfig, RolloutConfig
from rhymeflow.learner.learner import Learner
from rhymeflow.learner.sample import Sample
from rhymeflow.models import attention

VOCAB = 23

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES = {
    "qwen3_moe": {**EXPERTS, "head_dim": 8, "norm_topk_prob": True},
    # These scale or cap their logits.
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 1.7},
    "nanochat": {"final_logit_softcapping": 2.0},
}
"""Further fields of the configuration, by `model_type`."""


def tiny_model(
    kind: str = "llama",
    *,
    seed: int = 0,
    attn: str = attention.NAME,
    tied: bool = True,
    **more: object,
) -> PreTrainedModel:
    """About 20 thousand parameters, large enough weights that the policy is far from uniform.
    `more`: fields of its configuration."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "tie_word_embeddings": tied,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = CONFIG_MAPPING[kind](**{**sizes, **FAMILIES.get(kind, {}), **more})
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attn).eval()


def made_up_batch(
    *, groups: int = 4, members: int = 4, longest: int = 20, seed: int = 0, turns: bool = False
) -> list[Sample]:
    """Groups of one prompt each, ragged responses, a few truncated, log-probabilities off-policy.
    Group 1 has equal rewards. With `turns`, about a third of the tokens are an environment's."""
    rng, answers = random.Random(seed), random.Random(f"answers {seed}")
    batch = []
    for group in range(groups):
        prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 8))]
        for _ in range(members):
            length = rng.randrange(1, longest + 1)
            batch.append(
                Sample(
                    group=group,
                    prompt_ids=prompt,
                    completion_ids=[rng.randrange(3, VOCAB) for _ in range(length)],
                    logprobs=[-rng.uniform(0.5, 6.0) for _ in range(length)],
                    versions=[0] * length,
                    reward=1.0 if group == 1 else rng.choice([0.0, 0.25, 1.0]),
                    truncated=rng.random() < 0.3,
                    observed=[i > 0 and answers.random() < 0.35 for i in range(length)]
                    if turns
                    else [],
                )
            )
    return batch


def learner_config(**changes: object) -> LearnerConfig:
    fields = {"groups_per_batch": 4, "learning_rate": 1e-3, "max_steps": 10, **changes}
    return LearnerConfig.model_validate(fields)


def rollout_config(**changes: object) -> RolloutConfig:
    return RolloutConfig.model_validate(
        {"num_generations": 4, "max_completion_length": 20, **changes}
    )


def tiny_learner(
    *,
    dtype: torch.dtype = torch.float32,
    model: PreTrainedModel | None = None,
    rollout: RolloutConfig | None = None,
    **changes: object,
) -> Learner:
    model = tiny_model() if model is None else model
    rollout = rollout_config() if rollout is None else rollout
    return Learner(model, None, learner_config(**changes), rollout, dtype)


def gradients(learner: Learner, batch: list[Sample]) -> tuple[dict[str, torch.Tensor], dict]:
    """Gradients of one step, before clipping, and its metrics; the weights stay. The gradient is
    read where the optimizer reads it: from the float32 masters."""
    optimizer = learner._optimizer
    kept: dict[str, torch.Tensor] = {}

    def look(rate: float, scale: float) -> float:
        for name, master in optimizer._masters.items():
            grad = torch.zeros_like(master) if master.grad is None else master.grad
            kept[name] = grad * scale
            master.grad = None
        return 0.0

    optimizer.step, real = look, optimizer.step
    metrics = learner.train(batch, 0)
    optimizer.step = real
    return kept, metrics


def copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in tensors.items()}


def equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(each, other[name]) for name, each in one.items())


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float) -> None:
    """Equal names; each tensor equal within `tolerance` of its own largest entry."""
    assert a.keys() == b.keys()
    for name in a:
        scale = max(float(b[name].abs().max()), 1e-6)
        error = float((a[name].float() - b[name].float()).abs().max()) / scale
        assert error < tolerance, f"{name}: relative error {error}"
