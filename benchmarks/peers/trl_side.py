"""Train a Rhymeflow configuration in TRL's `GRPOTrainer`, and write down when each step ended.

    python -m benchmarks.peers.trl_side CONFIG.yaml OUT.json [--cb] [--per-device N] [--autocast]

Holds true: the same model files, prompt tokens in the same order, reward function, batch, lengths,
sampling and optimizer settings; TRL's own defaults otherwise, less what costs it time for nothing
(gradient checkpointing, logging, saving). Writes `ends` (seconds), and `lengths` and `rewards`
(means) step by step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rhymeflow.config import Config, RewardFunction
from rhymeflow.config.load import read_config
from rhymeflow.data.encode import PromptEncoder
from rhymeflow.data.load import load_prompts
from rhymeflow.data.prompts import PromptSource
from rhymeflow.data.stream import PromptStream
from rhymeflow.models.converted import converted
from rhymeflow.models.load import load_tokenizer, resolve_device, resolve_dtype
from rhymeflow.models.source import locate
from rhymeflow.reward.functions import Judge
from rhymeflow.reward.messages import RewardRequest


class Clock(TrainerCallback):
    """Notes the time at the end of each optimizer step, and TRL's own metrics so far."""

    def __init__(self) -> None:
        self.trainer: GRPOTrainer | None = None
        self.ends: list[float] = []
        self.lengths: list[float] = []
        self.rewards: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the time."""
        self.ends.append(time.time())
        assert self.trainer is not None
        metrics = self.trainer._metrics["train"]  # emptied at the end of training
        self.lengths = list(metrics["completions/mean_length"])
        self.rewards = list(metrics["reward"])


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--per-device", type=int, help="sequences per forward and backward")
    parser.add_argument("--cb", action="store_true", help="transformers' continuous batching")
    parser.add_argument("--autocast", action="store_true", help="bf16=True over float32 weights")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    config = read_config(str(args.config))
    with tempfile.TemporaryDirectory() as folder:
        clock, trainer = build(config, folder, args)
        trainer.train()
    result = {
        "ends": clock.ends,
        "lengths": clock.lengths,
        "rewards": clock.rewards,
        "threads": torch.get_num_threads(),
    }
    args.out.write_text(json.dumps(result))


def build(config: Config, folder: str, args: argparse.Namespace) -> tuple[Clock, GRPOTrainer]:
    """Return the trainer, and the clock that it carries."""
    tokenizer = load_tokenizer(config.model)
    clock = Clock()
    device = resolve_device(config.model)
    dtype = torch.float32 if args.autocast else resolve_dtype(config.model, device)
    source = locate(config.model)
    folder_of_model = source.location if source.gguf_path is None else converted(source.gguf_path)
    prompts, _ = load_prompts(config.data, config.run.seed)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            folder_of_model, dtype=dtype, attn_implementation="sdpa"
        ),
        processing_class=tokenizer,
        reward_funcs=[reward(function, prompts) for function in config.reward.functions],
        train_dataset=dataset(prompts, config, tokenizer),
        args=arguments(config, folder, args, on_cpu=device.type == "cpu"),
        callbacks=[clock],
    )
    clock.trainer = trainer
    return clock, trainer


def arguments(config: Config, folder: str, args: argparse.Namespace, *, on_cpu: bool) -> GRPOConfig:
    """Carry the settings over, field by field."""
    learner, rollout = config.learner, config.rollout
    batch = learner.groups_per_batch * rollout.num_generations
    per_device = args.per_device or batch
    return GRPOConfig(
        output_dir=folder,
        use_cpu=on_cpu,
        seed=config.run.seed,
        shuffle_dataset=False,
        max_steps=learner.max_steps,
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=batch // per_device,
        num_generations=rollout.num_generations,
        max_completion_length=rollout.max_completion_length,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        learning_rate=learner.learning_rate,
        lr_scheduler_type=learner.lr_scheduler_type,
        warmup_steps=learner.warmup_steps,
        adam_beta1=learner.adam_beta1,
        adam_beta2=learner.adam_beta2,
        adam_epsilon=learner.adam_epsilon,
        weight_decay=learner.weight_decay,
        max_grad_norm=learner.max_grad_norm or 0.0,
        num_iterations=learner.num_iterations,
        loss_type=learner.loss_type,
        scale_rewards=learner.scale_rewards,
        epsilon=learner.epsilon,
        epsilon_high=learner.epsilon_high,
        beta=learner.beta,
        mask_truncated_completions=learner.mask_truncated_completions,
        reward_weights=[function.weight for function in config.reward.functions],
        use_transformers_continuous_batching=args.cb,
        bf16=args.autocast,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def dataset(prompts: PromptSource, config: Config, tokenizer: Any) -> Dataset:
    """Return the prompts in the run's order, as texts that tokenize to what the policy is given."""
    encoder = PromptEncoder(tokenizer, config.data)
    stream = PromptStream(prompts, config.run.seed, config.data.shuffle)
    rows = []
    for serial in range(config.learner.max_steps * config.learner.groups_per_batch):
        _, prompt = stream.at(serial)
        ids = encoder.encode(prompt)
        text = tokenizer.decode(ids)
        if list(tokenizer(text=text)["input_ids"]) != ids:
            raise SystemExit(
                f"{prompt.where}: does not tokenize to the same tokens in TRL: {text!r}"
            )
        rows.append({"prompt": text, "row": prompt.row})
    return Dataset.from_list(rows)


def reward(function: RewardFunction, source: PromptSource) -> Callable[..., list[float | None]]:
    """Return the reward function itself, called as our workers call it."""
    judge, runner = Judge(function), asyncio.Runner()

    def judged(
        completions: list[str], completion_ids: list[list[int]], row: list[int], **_: Any
    ) -> list[float | None]:
        prompts = [source[index] for index in row]
        requests = [
            RewardRequest(prompt.prompt, completion, ids, prompt.columns)
            for prompt, completion, ids in zip(prompts, completions, completion_ids, strict=True)
        ]
        return [judge(request, runner) for request in requests]

    return judged


if __name__ == "__main__":
    main()
