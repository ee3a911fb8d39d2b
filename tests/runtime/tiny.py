"""A run small enough for tests: a random model of 20 thousand parameters, prompts of a few digits.

Its reward, the share of even digits, is one that a random model gets now and then. It does not
draft: loading compiled code takes a process more and longer than the rest of the run. Tests of
drafts ask for a window."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from rhymeflow.config import Config
from rhymeflow.observe import metrics
from tests.characters import make_tokenizer, small_llama
from tests.runtime import even

NUM_PROMPTS = 12


def save_model(
    directory: Path, seed: int = 0, *, unused_ids: int = 0, max_length: int = 128
) -> Path:
    """Save a random model. With many `unused_ids`, which mean no text, it hardly ever stops."""
    tokenizer = make_tokenizer("0123456789+=?", max_length)
    torch.manual_seed(seed)
    sizes = {"intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(small_llama(len(tokenizer) + unused_ids, max_length, **sizes))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def save_prompts(path: Path, count: int = NUM_PROMPTS) -> Path:
    rows = [{"prompt": f"{i:02}+{3 * i % 10}?", "answer": str(i)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def program(config: Config, directory: Path, **how: Any) -> subprocess.Popen:
    """`rhymeflow train` of this configuration, in an interpreter of its own."""
    command = [sys.executable, "-m", "rhymeflow", "train", file_of(config, directory)]
    return subprocess.Popen(command, **how)


def file_of(config: Config, directory: Path) -> str:
    """A new file with this configuration."""
    file = directory / "config.yaml"
    file.write_text(json.dumps(config.model_dump(mode="json")))
    return str(file)


def until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait for it."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def published(run_dir: Path) -> int:
    """The last version whose metrics are written."""
    return max(metrics.read(run_dir), default=0)


def tiny_config(directory: Path, *, runtime: str = "local", **sections: dict[str, Any]) -> Config:
    """A valid configuration in `directory`; `sections` replace single fields."""
    model = directory / "model"
    if not model.exists():
        save_model(model)
        save_prompts(directory / "prompts.jsonl")
    values: dict[str, Any] = {
        "name": "tiny",
        "runtime": runtime,
        "model": {"name": str(model), "dtype": "float32", "device": "cpu"},
        "data": {"source": str(directory / "prompts.jsonl"), "eval_size": 2},
        "rollout": {
            "num_generations": 3,
            "max_completion_length": 12,
            "max_num_seqs": 8,
            "num_threads": 1,
        },
        "drafting": {"window": "off", "history_tokens": 100_000},
        "reward": {"functions": [{"function": f"{even.__file__}:even_digits"}]},
        "learner": {"max_steps": 4, "groups_per_batch": 2, "learning_rate": 1e-2, "num_threads": 1},
        "schedule": {"max_staleness": 1},
        "run": {"eval_steps": 2, "report_to": [], "output_dir": str(directory / "run")},
    }
    for section, fields in sections.items():
        values[section] = {**values.get(section, {}), **fields}
    return Config.model_validate(values)
