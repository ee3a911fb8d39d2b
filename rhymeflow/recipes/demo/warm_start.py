"""Makes the demo's checkpoint: `python -m rhymeflow.recipes.demo.warm_start DIRECTORY`.

A Llama of 0.8 million parameters and a character tokenizer, trained on the solutions of a careless
teacher that forgets every other carry. So the model knows how a sum is written out, finds each
term and ends in time, but is right only about four times in ten: what is left for reinforcement
learning, which sees nothing but the final answer, is to find out that carries matter.

One thread, one seed, float32; the weights are stored in bfloat16 (half the size) with their digest
in `warm_start.json`. Another CPU or torch may round differently and so give other digits with the
same behaviour.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rhymeflow.recipes.demo import task

SEED = 20_000
STEPS = 1600
TOKENS_PER_STEP = 2048
LEARNING_RATE = 2e-3
FORGOTTEN_CARRIES = 0.5
MAX_LENGTH = 768
"""Longest prompt and response together, in tokens: 42 terms take 126 + 441."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; `<pad>` is 0, `<eos>` is 1."""
    vocabulary = {symbol: index for index, symbol in enumerate(["<pad>", "<eos>", *task.ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Random weights: 4 layers, hidden 128, 4 heads of 32 with 2 key-value heads."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=MAX_LENGTH,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            tie_word_embeddings=True,
            initializer_range=0.08,  # about 1 / sqrt(128); the usual 0.02 learns three times slower
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def batches(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of problems of one length each: ids [B, T], labels [B, T] (-100: prompt).

    Three quarters of the batches have a number of terms as the task draws it, the others a uniform
    one, so that every length is covered.
    """
    noise = random.Random(seed)
    lengths = [problem["terms"] for problem in task.problems(4096, seed)]
    while True:
        terms = (
            noise.choice(lengths) if noise.random() < 0.75 else noise.randint(2, len(task.LABELS))
        )
        rows, starts = [], []
        for _ in range(max(1, TOKENS_PER_STEP // (14 * terms))):
            digits = [noise.randrange(10) for _ in range(terms)]
            prompt = tokenizer.encode(task.write_prompt(digits))
            taught = task.solution(digits, lambda: noise.random() < FORGOTTEN_CARRIES)
            rows.append([*prompt, *tokenizer.encode(taught), tokenizer.eos_token_id])
            starts.append(len(prompt))
        longest = max(map(len, rows))
        ids_BT = torch.zeros(len(rows), longest, dtype=torch.long)
        labels_BT = torch.full_like(ids_BT, -100)
        for row, (tokens, start) in enumerate(zip(rows, starts, strict=True)):
            ids_BT[row, : len(tokens)] = torch.tensor(tokens)
            labels_BT[row, start : len(tokens)] = ids_BT[row, start : len(tokens)]
        yield ids_BT, labels_BT


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int) -> None:
    """AdamW in place: linear warm-up over 50 steps, constant, linear to 0 over the last fifth."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    stream = batches(tokenizer, SEED)
    for step in range(steps):
        scale = min(1.0, (step + 1) / 50, 5 * (1 - step / steps))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * scale
        ids_BT, labels_BT = next(stream)
        logits_BTV = model(input_ids=ids_BT).logits[:, :-1]
        loss = cross_entropy(logits_BTV.flatten(0, 1), labels_BT[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            print(f"step {step + 1:4d}  loss {loss.item():.4f}", flush=True)


def digest(directory: Path) -> str:
    """SHA-256 over the weights and the tokenizer of a checkpoint directory."""
    content = hashlib.sha256()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        content.update((directory / name).read_bytes())
    return content.hexdigest()


def main() -> None:
    """Train, save, and write `warm_start.json` beside the weights."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    train(model, tokenizer, args.steps)
    model.to(torch.bfloat16).save_pretrained(args.directory)
    tokenizer.save_pretrained(args.directory)
    made = {"seed": SEED, "steps": args.steps, "sha256": digest(args.directory)}
    (args.directory / "warm_start.json").write_text(json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    main()
