"""The same numbers as TRL 1.16, from TRL's own code on the same inputs."""

from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from rhymeflow.learner.algorithms.advantages import group_advantages
from rhymeflow.learner.learner import Learner
from rhymeflow.learner.packing import pack
from rhymeflow.learner.sample import Sample
from tests.learner.builders import (
    VOCAB,
    close,
    gradients,
    made_up_batch,
    rollout_config,
    tiny_learner,
    tiny_model,
)

ADAM_EPSILON = 1e-3
"""Large: AdamW's first step is of full size even where the gradient is a rounding error."""

CASES = [
    (loss_type, correction, 0.2 * ((i + j) % 2), (i // 2 + j) % 2 == 1)
    for i, loss_type in enumerate(["grpo", "bnpo", "dr_grpo", "dapo"])
    for j, correction in enumerate(["none", "tis", "decoupled"])
]
"""Any two of these four choices come together in each way."""


def _padded(rows: list[list[float]], left: bool, value: float = 0) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor(
        [[value] * (width - len(r)) + r if left else r + [value] * (width - len(r)) for r in rows]
    )


def _trl_trainer(loss_type: str, beta: float, correction: str, model) -> GRPOTrainer:
    """A GRPOTrainer with what `_compute_loss` reads and nothing else."""
    trainer = object.__new__(GRPOTrainer)
    one_process = {"num_processes": 1, "is_main_process": False, "autocast": nullcontext}
    trainer.accelerator = SimpleNamespace(
        gather=lambda x: x, reduce=lambda x, reduction: x, **one_process
    )
    trainer.args = SimpleNamespace(
        delta=None, use_bias_correction_kl=True, steps_per_generation=1, report_to=[]
    )
    trainer.model, trainer.max_completion_length = model, 20
    trainer.loss_type, trainer.beta = loss_type, beta
    trainer.epsilon_low, trainer.epsilon_high = 0.2, 0.28
    trainer.importance_sampling_level = "token"
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = correction != "none"
    trainer.top_entropy_quantile, trainer.off_policy_mask_threshold = 1.0, None
    trainer.aux_loss_enabled = trainer._entropy_bonus_enabled = False
    trainer.current_gradient_accumulation_steps = 1
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    trainer.state = SimpleNamespace(global_step=0)
    return trainer


def _trl_inputs(batch, advantages, masked) -> dict[str, torch.Tensor]:
    """Left-padded prompts, right-padded responses, masked ones without a token."""
    prompts = [s.prompt_ids for s in batch]
    responses = [s.completion_ids for s in batch]
    mask = _padded([[int(not m)] * len(r) for r, m in zip(responses, masked, strict=True)], False)
    return {
        "prompt_ids": _padded(prompts, True),
        "prompt_mask": _padded([[1] * len(p) for p in prompts], True),
        "completion_ids": _padded(responses, False),
        "completion_mask": mask,
        "advantages": torch.tensor(advantages, dtype=torch.float32),
        "num_items_in_batch": mask.sum(),
    }


def _per_token_logps(trainer: GRPOTrainer, model, inputs) -> torch.Tensor:
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad():
        found = trainer._get_per_token_logps_and_entropies(
            model, ids, mask, inputs["completion_ids"].shape[1]
        )
    return found[0]


@pytest.mark.parametrize(("loss_type", "correction", "beta", "masked"), CASES)
def test_loss_gradient_and_metrics(loss_type, correction, beta, masked):
    """One step on a batch from another policy; TRL's inputs are padded, ours packed. TRL's
    `token_truncate` and `token_mask` are our `truncate` and `decoupled`."""
    batch = made_up_batch()
    advantages = group_advantages([s.reward for s in batch], [s.group for s in batch], "group")
    reference, temperature = tiny_model(seed=5, attn="eager"), 0.9
    theirs = tiny_model(attn="eager").train()
    for model in (theirs, reference):
        add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy"))
    trainer = _trl_trainer(loss_type, beta, correction, theirs)
    is_masked = [masked and s.truncated for s in batch]
    inputs = _trl_inputs(batch, advantages.values, is_masked)
    behaviour = _padded([s.logprobs for s in batch], False)
    policy = _per_token_logps(trainer, theirs, inputs)
    if correction == "none":
        inputs["old_per_token_logps"] = behaviour
    else:
        u = (policy - behaviour).exp()
        weight = u.clamp(max=2.0) if correction == "tis" else u.masked_fill(u > 2.0, 0.0)
        inputs |= {"old_per_token_logps": policy, "importance_sampling_ratio": weight}
    if beta:
        inputs["ref_per_token_logps"] = _per_token_logps(trainer, reference, inputs)
    loss = trainer._compute_loss(theirs, inputs)
    loss.backward()

    rollout = rollout_config(temperature=temperature)
    learner = tiny_learner(
        rollout=rollout,
        loss_type=loss_type,
        beta=beta,
        off_policy_correction=correction,
        mask_truncated_completions=masked,
        max_tokens_per_microbatch=50,
    )
    if beta:
        learner._reference.model.load_state_dict(tiny_model(seed=5).state_dict())
    found, metrics = gradients(learner, batch)
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-6)
    close(found, {n: p.grad for n, p in theirs.named_parameters()}, 5e-4)
    for name, values in trainer._metrics["train"].items():
        if name in metrics:
            assert metrics[name] == pytest.approx(values[0], rel=1e-4, abs=1e-5), name
    names = {name for name in trainer._metrics["train"] if name.startswith("clip_ratio/")}
    assert names == {name for name in metrics if name.startswith("clip_ratio/")}
    assert names >= {"clip_ratio/low_min", "clip_ratio/high_max"}
    assert correction != "none" or metrics["clip_ratio/region_mean"] > 0


class _Recording(GRPOTrainer):
    """A trainer that keeps its batches and advantages."""

    def _generate_and_score_completions(self, inputs):
        out = super()._generate_and_score_completions(inputs)
        rewards = list(self._logs["rewards"]["paid"])[-len(inputs) :]
        self.recorded.append((out, rewards))
        return out


def _tokenizer() -> PreTrainedTokenizerFast:
    names = ["<pad>", "<bos>", "<eos>", *(f"t{n}" for n in range(3, VOCAB))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="t3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def paid(completions, **kwargs) -> list[float]:
    return [sum(word in ("t5", "t9") for word in text.split()) / 4 for text in completions]


@pytest.mark.parametrize(("loss_type", "scale"), [("dapo", "group"), ("grpo", "batch")])
def test_a_real_trainer_step_by_step(tmp_path, loss_type, scale):
    """TRL trains a tiny model for three steps; fed with TRL's rollouts we make the same weights.
    One accumulation window of one micro-batch: TRL's `grpo` means are exact there too."""
    torch.manual_seed(0)
    # From a directory: TRL loads the reference from where the model came from.
    tiny_model(attn="eager").save_pretrained(tmp_path / "model")
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    shared = {
        "max_steps": 3,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 0.4,
        "adam_epsilon": ADAM_EPSILON,
        "loss_type": loss_type,
        "scale_rewards": scale,
        "beta": 0.05,
    }
    sampling = {"temperature": 0.9, "max_completion_length": 12, "num_generations": 4}
    args = GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=16,
        gradient_accumulation_steps=1,
        **shared,
        **sampling,
        epsilon=0.2,
        epsilon_high=0.28,
        top_k=0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        seed=1,
    )
    trainer = _Recording(
        model=theirs,
        reward_funcs=paid,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["t4 t7", "t8", "t3 t3 t6", "t9 t4"] * 4}),
        processing_class=_tokenizer(),
    )
    trainer.recorded = []
    trainer.train()

    rollout = rollout_config(**sampling)
    learner = tiny_learner(rollout=rollout, max_tokens_per_microbatch=64, **shared)
    assert len(trainer.recorded) == 3
    for step, (out, rewards) in enumerate(trainer.recorded):
        batch = _samples(learner, out, rewards)
        metrics = learner.train(batch, step)
        for name in ("loss", "grad_norm", "learning_rate", "entropy", "kl", "reward", "reward_std",
                     "frac_reward_zero_std", "completions/mean_length", "completions/min_length",
                     "completions/max_length", "completions/clipped_ratio", "num_tokens",
                     "completions/mean_terminated_length", "completions/min_terminated_length",
                     "completions/max_terminated_length", "clip_ratio/low_min",
                     "clip_ratio/high_max", "clip_ratio/region_mean"):  # fmt: skip
            expected = pytest.approx(
                float(trainer.state.log_history[step][name]), rel=2e-3, abs=1e-5
            )
            assert metrics[name] == expected, f"{name} of step {step}"
    close(learner.rows(), {n: p.detach() for n, p in theirs.named_parameters()}, 1e-3)
    start = dict(tiny_model().named_parameters())
    moved = max(float((w - start[n]).abs().max()) for n, w in learner.rows().items())
    assert moved > 5e-3


def _samples(learner: Learner, out: dict[str, torch.Tensor], rewards: list[float]) -> list[Sample]:
    """TRL's padded batch as samples; on-policy, so the behaviour's scores are the learner's."""
    batch = []
    for i, reward in enumerate(rewards):
        prompt = out["prompt_ids"][i][out["prompt_mask"][i].bool()].tolist()
        response = out["completion_ids"][i][out["completion_mask"][i].bool()].tolist()
        zeros, is_cut = [0] * len(response), response[-1] not in (0, 2)
        sample = Sample(i // 4, prompt, response, zeros, zeros, reward, is_cut, {"f": reward})
        logprob, _ = learner._policy.score(*pack([sample], [0], 10**6))
        batch.append(replace(sample, logprobs=logprob.tolist()))
    return batch
