"""Train a Rhymeflow configuration in TRL's `GRPOTrainer`, and record when each step ended.

    python -m benchmarks.peers.trl_side CONFIG.yaml OUT.json --threads N --per-device N

The same model, prompts, reward and settings; TRL's own defaults otherwise, without what would only
cost it time. Writes `ends` (seconds) and mean `lengths`, by step.
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
from rhymeflow.data.prompts import Prompt
from rhymeflow.data.stream import PromptStream
from rhymeflow.models.converted import converted
from rhymeflow.models.load import resolve_dtype
from rhymeflow.models.precision import resolve_device
from rhymeflow.models.source import locate
from rhymeflow.models.tokenizer import load_tokenizer
from rhymeflow.reward.functions import Judge
from rhymeflow.reward.messages import RewardRequest, TrainerState


class Clock(TrainerCallback):
    """Records the time at the end of each optimizer step, and the mean lengths so far."""

    def __init__(self) -> None:
        self.trainer: GRPOTrainer | None = None
        self.ends: list[float] = []
        self.lengths: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(time.time())
        assert self.trainer is not None
        metrics = self.trainer._metrics["train"]  # emptied at the end of training
        self.lengths = list(metrics["completions/mean_length"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--per-device", type=int, required=True, help="sequences at a time")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    config = read_config(str(args.config))
    with tempfile.TemporaryDirectory() as folder:
        clock, trainer = build(config, folder, args.per_device)
        trainer.train()
    args.out.write_text(json.dumps({"ends": clock.ends, "lengths": clock.lengths}))


def build(config: Config, folder: str, per_device: int) -> tuple[Clock, GRPOTrainer]:
    tokenizer, device = load_tokenizer(config.model), resolve_device(config.model)
    clock, source = Clock(), locate(config.model)
    where = source.location if source.gguf_path is None else converted(source.gguf_path)
    prompts, _ = load_prompts(config.data, config.run.seed)
    how: Any = {"dtype": resolve_dtype(config.model, device), "attn_implementation": "sdpa"}
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(where, **how),
        processing_class=tokenizer,
        reward_funcs=[reward(function, prompts) for function in config.reward.functions],
        train_dataset=dataset(prompts, config, tokenizer),
        args=arguments(config, folder, per_device, device),
        callbacks=[clock],
    )
    clock.trainer = trainer
    return clock, trainer


SAME = (
    "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_steps",
    "num_iterations", "loss_type", "scale_rewards", "epsilon", "epsilon_high", "beta",
    "mask_truncated_completions", "adam_beta1", "adam_beta2", "adam_epsilon",
)  # fmt: skip
SAMPLING = ("num_generations", "max_completion_length", "temperature", "top_p", "top_k")
"""Fields of `learner` and of `rollout` that TRL calls the same."""


def arguments(config: Config, folder: str, per_device: int, device: torch.device) -> GRPOConfig:
    learner, rollout = config.learner, config.rollout
    batch = learner.groups_per_batch * rollout.num_generations
    return GRPOConfig(
        **{name: getattr(learner, name) for name in SAME},
        **{name: getattr(rollout, name) for name in SAMPLING},
        output_dir=folder,
        use_cpu=device.type == "cpu",
        bf16=False,  # no autocast: the weights are of the type that both sides compute in
        seed=config.run.seed,
        shuffle_dataset=False,
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=batch // per_device,
        max_grad_norm=learner.max_grad_norm or 0.0,
        reward_weights=[function.weight for function in config.reward.functions],
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def dataset(prompts: list[Prompt], config: Config, tokenizer: Any) -> Dataset:
    """Return the prompts in the run's order, as texts that tokenize to what the policy is given."""
    encoder = PromptEncoder(tokenizer, config.data)
    stream = PromptStream(prompts, config.run.seed, config.data.shuffle)
    rows = []
    for serial in range(config.learner.max_steps * config.learner.groups_per_batch):
        _, prompt = stream.at(serial)
        ids = encoder.encode(prompt)
        text = tokenizer.decode(ids)
        if list(tokenizer(text=text)["input_ids"]) != ids:
            raise SystemExit(f"{prompt.where}: TRL tokenizes {text!r} to other tokens")
        rows.append({"prompt": text, "row": prompt.row})
    return Dataset.from_list(rows)


def reward(function: RewardFunction, source: list[Prompt]) -> Callable[..., list[float | None]]:
    """Return the reward function itself, called as our workers call a built-in: per response."""
    judge, runner, state = Judge(function), asyncio.Runner(), TrainerState(0, 1)

    def judged(
        completions: list[str], completion_ids: list[list[int]], row: list[int], **_: Any
    ) -> list[float | None]:
        prompts = [source[index] for index in row]
        requests = [
            RewardRequest(prompt.prompt, [completion], [ids], prompt.columns, state)
            for prompt, completion, ids in zip(prompts, completions, completion_ids, strict=True)
        ]
        return [value for request in requests for value in judge(request, runner)]

    return judged


if __name__ == "__main__":
    main()
