"""Compiles kernels and bytecode before the first run: `python -m rhymeflow.workers.precompile`.

The installer calls it. Otherwise the first run compiles in the background, and drafts only then."""

from __future__ import annotations

import importlib

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rhymeflow.config import Config, DraftingConfig
from rhymeflow.cpu.tiles import LANES
from rhymeflow.engine.native.cpu_attention import DTYPES, CpuAttention
from rhymeflow.histospec import drafter
from rhymeflow.learner.cpu_attention import CpuPackedAttention
from rhymeflow.models import attention
from rhymeflow.weights import proof
from rhymeflow.weights.changes import Finder
from rhymeflow.weights.kernels import put_changes
from rhymeflow.weights.manifest import plan

HEAD_DIM = 64  # the kernels are the same for every size

IMPORTED = (
    *("rhymeflow.cli", "rhymeflow.runtime.train", "rhymeflow.workers.learner"),
    *("rhymeflow.engine.native.native_engine",),
    *("rhymeflow.workers.rollout", "rhymeflow.workers.reward", "rhymeflow.workers.history"),
    *("rhymeflow.reward.calls", "transformers.models.llama.modeling_llama"),
    *("rhymeflow.workers.environment", "rhymeflow.environments.live"),
    *("torch.utils.tensorboard",),
)


def main() -> None:
    """Compile for this machine's processor."""
    for module in IMPORTED:
        importlib.import_module(module)
    compile_weights()
    for dtype in DTYPES:
        CpuAttention(dtype, HEAD_DIM)
    compile_learner()
    for shape in ("linear", "tree"):
        drafter.rehearse(Config(drafting=DraftingConfig(shape=shape)))


def compile_weights() -> None:
    """Compile the kernels that hash weights, find changes in them and apply these."""
    old, new = np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
    new[7] = 1
    finder = Finder(plan({"w": ((2048,), torch.bfloat16)}))
    read_only = old.copy()  # as an object store's buffers are: numba compiles another function
    read_only.flags.writeable = False
    assert finder.find(new, read_only).changed == 1
    changes = finder.find(new, old)
    assert changes.listed is not None
    proof.digest(old)
    put_changes(old.view(np.uint16), *changes.listed, proof.INNER, 0)
    assert (old == new).all()


def compile_learner() -> None:
    """Compile the learner's kernels."""
    places, positions_1T = np.arange(3), torch.arange(3)[None]
    config = LlamaConfig(
        vocab_size=8, hidden_size=LANES, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation=attention.NAME)
    with attention.attending(CpuPackedAttention([places], len(places), torch.device("cpu"))):
        hidden_TD = model.model(positions_1T, position_ids=positions_1T).last_hidden_state[0]
    hidden_TD.sum().backward()


if __name__ == "__main__":
    main()
