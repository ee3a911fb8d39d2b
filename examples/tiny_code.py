"""A tiny model learns to write small functions that pass unit tests, from nothing, on two cores.

    python examples/tiny_code.py DIRECTORY

It first learns Python from a careless teacher, who mostly takes odd for even and over for under.
Then it is rewarded by `code_execution` (docs/code.md). The held-out reward of
its likeliest responses rose from 0.05 to 0.36 in 60 steps, 16 minutes on two busy cores.
"""

from __future__ import annotations

import json
import random
import string
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from rhymeflow import cli

ALPHABET = string.ascii_lowercase + string.digits + " \n`:()[]%=<>*+-"
NUMBERS = {"numbers": "", "odds": "a%2==1", "evens": "a%2==0"}
BOUNDS = {"over": "a>", "under": "a<"}
ITEMS = {"": "a", "squares of ": "a*a", "doubles of ": "a*2", "negatives of ": "-a"}
RESULTS = {"sum": "sum({})", "largest": "max({})", "smallest": "min({})", "list": "[{}]"}
Parts = tuple[str, str, str, str, int]


def drawn(count: int, seed: int) -> list[Parts]:
    """Draw distinct functions."""
    noise, found = random.Random(seed), dict[Parts, None]()
    while len(found) < count:
        names = [noise.choice([*each]) for each in (RESULTS, ITEMS, NUMBERS, BOUNDS)]
        found[(*names, noise.randint(1, 99))] = None  # type: ignore[index]
    return [*found]


def described(parts: Parts) -> str:
    """Return the prompt, such as `sum of squares of odds over 4:`."""
    result, item, numbers, bound, limit = parts
    return f"{result} of {item}{numbers} {bound} {limit}:"


def written(parts: Parts) -> str:
    """Return the function in Python, as a response."""
    result, item, numbers, bound, limit = parts
    kept = " and ".join(filter(None, [NUMBERS[numbers], f"{BOUNDS[bound]}{limit}"]))
    body = RESULTS[result].format(f"{ITEMS[item]} for a in x if {kept}")
    return f"```python\ndef f(x):\n return {body}\n```"


def tests(parts: Parts) -> list[str]:
    """Return three assertions that hold of the function."""
    names: dict[str, Any] = {}
    exec(written(parts)[len("```python") : -len("```")], names)
    noise, found = random.Random(described(parts)), list[str]()
    while len(found) < 3:
        numbers = noise.sample(range(-50, 150), 8)
        with suppress(ValueError):  # of nothing there is no largest
            found.append(f"assert f({numbers}) == {names['f'](numbers)}")
    return found


def careless(parts: Parts, noise: random.Random) -> str:
    """Return what the teacher writes."""
    swapped = {"odds": "evens", "evens": "odds", "over": "under", "under": "over"}
    result, item, *words, limit = parts
    numbers, bound = (swapped.get(w, w) if noise.random() < 0.6 else w for w in words)
    return written((result, item, numbers, bound, limit))


def write_model(directory: Path) -> None:
    """Write the configuration of a tiny model that reads a character at a time, without weights."""
    vocabulary = {text: index for index, text in enumerate(["<pad>", "<eos>", *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", model_max_length=160
    ).save_pretrained(directory)
    LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=len(vocabulary), hidden_size=96,
        intermediate_size=256, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=3,
        max_position_embeddings=160, tie_word_embeddings=True, initializer_range=0.08,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    ).save_pretrained(directory)  # fmt: skip


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(f"{json.dumps(each)}\n" for each in rows), encoding="utf-8")


def main(directory: Path, sft_steps: int = 500, steps: int = 60) -> int:
    """Write data and model into the directory, fine-tune, train."""
    write_model(directory / "model")
    noise = random.Random(0)
    taught, asked = drawn(5000, seed=1), drawn(640, seed=2)
    shown = [{"prompt": described(each), "completion": careless(each, noise)} for each in taught]
    problems = [{"prompt": described(each), "tests": tests(each)} for each in asked]
    write_rows(directory / "shown.jsonl", shown)
    write_rows(directory / "problems.jsonl", problems)
    common = ["--learner.num_threads=1", "--rollout.num_threads=1"]
    failed = cli.main([
        "sft", f"--model={directory / 'model'}", f"--data={directory / 'shown.jsonl'}",
        f"--sft.output_dir={directory / 'warm'}", "--sft.init=config",
        f"--sft.max_steps={sft_steps}", "--sft.tokens_per_batch=2048", "--sft.learning_rate=2e-3",
        "--sft.warmup_steps=50", *common,
    ])  # fmt: skip
    return failed or cli.main([
        "train", f"--model={directory / 'warm'}", f"--data={directory / 'problems.jsonl'}",
        "--reward=code_execution", f"--run.output_dir={directory / 'run'}",
        "--data.eval_size=64", "--rollout.max_completion_length=80", "--rollout.max_num_seqs=128",
        "--learner.groups_per_batch=16", "--learner.learning_rate=1e-4", "--run.eval_steps=10",
        "--reward.num_workers=2", f"--learner.max_steps={steps}", *common,
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
