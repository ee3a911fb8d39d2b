"""What a dry run shows: what would be trained on, what it needs, and the configuration.

Holds true: all but the configuration are comments, so what is printed is a file that loads back
equal; text of data and templates does not act on the terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rhymeflow.config import Config
from rhymeflow.config.load import dump_config
from rhymeflow.core.types import HELD_OUT
from rhymeflow.errors import UserError

if TYPE_CHECKING:
    from rhymeflow.check import Loaded
    from rhymeflow.learner.sample import Sample

_LINES, _WIDTH = 24, 300
"""Of a text, so many are shown: half of the lines its first ones, half its last."""


def dry_run(config: Config, *, is_full: bool) -> None:
    """Print what `config` would do, its data read if `is_full`; raise what `train` would raise."""
    from rhymeflow import check
    from rhymeflow.runtime.run_dir import check_run_dir, choose_run_dir
    from rhymeflow.runtime.start import check_start

    lines: list[str] = []
    longest = None
    check_run_dir(choose_run_dir(config))
    if is_full:
        check_start(config)
        loaded = check.everything(config)
        longest = loaded.longest_prompt
        lines += _what_is_trained_on(config, loaded)
    if config.cluster.nodes is not None:
        from rhymeflow.cluster import plan

        needs = plan.describe(config)
    else:
        from rhymeflow import sizes  # loads torch; mistakes are said without waiting for it

        needs = sizes.describe(config, longest)
        if is_full and config.runtime == "local":
            _check_room(config, choose_run_dir(config).absolute())
    print("\n".join([*lines, needs.strip("\n"), dump_config(config)]), end="")


def _check_room(config: Config, run_dir: Path) -> None:
    """Refuse what a run refuses once the model's size is known."""
    from rhymeflow import sizes
    from rhymeflow.runtime import disk_space
    from rhymeflow.utils import shared_memory
    from rhymeflow.workers.learner import STATE_BYTES

    model = sizes.shape(config)
    checkpoint = model.num_parameters * (model.bytes_per_value + STATE_BYTES)
    there = next(each for each in (run_dir, *run_dir.parents) if each.exists())
    disk_space.DiskSpace(there, checkpoint).check(config.run.save_total_limit, 0)
    rows = sizes.estimate(config, model, sizes.ASSUMED_PROMPT)
    shared = sum(row.num_bytes for row in rows if "shared memory" in row.what)
    memory = shared_memory.DIRECTORY
    if memory.is_dir() and disk_space.free_bytes(memory) < shared:
        raise UserError(
            f"{memory} has {sizes.size_text(disk_space.free_bytes(memory))} free, and weights and "
            f"the index of history (drafting.history_tokens) take {sizes.size_text(shared)} there"
        )


def _what_is_trained_on(config: Config, loaded: Loaded) -> list[str]:
    from rhymeflow.observe.printable import shortened  # loads rich

    train, held_out = loaded.prompts.train, loaded.prompts.held_out
    ids = loaded.prompts.encoder.encode(train[0])
    suites = [(name, suite) for name, suite in loaded.suites.items() if name != HELD_OUT]
    batch, steps = config.learner.groups_per_batch, config.learner.max_steps
    in_batch = f", {batch / len(train):,.2f} times in a batch" if batch > len(train) else ""
    return [
        f"# rows: {len(train):,} to train on, {len(held_out):,} held out",
        *(f"#   suite {name}: {len(suite.prompts):,} prompts" for name, suite in suites),
        f"# each prompt comes {steps * batch / len(train):,.2f} times (epochs){in_batch}",
        f"# the first prompt, {train[0].where}, as the policy reads it ({len(ids):,} tokens):",
        *_comments(loaded.tokenizer, [("", ids)]),
        *(f"# reward {shortened(each, _WIDTH)}" for each in loaded.rewards),
        *([] if loaded.unseen is None else [f"# {shortened(loaded.unseen, _WIDTH)}"]),
    ]


def sft_dry_run(config: Config) -> None:
    """Print what `sft` would learn, and how; raise what it would raise before its first step."""
    from rhymeflow import sizes  # loads torch
    from rhymeflow.check import prove
    from rhymeflow.models.tokenizer import load_tokenizer
    from rhymeflow.sft.train import check, load

    check(config)
    prove(config, has_engine=False)
    model = sizes.shape(config)
    tokenizer = load_tokenizer(config.model)
    rows = load(config, tokenizer)
    tokens = sum(len(each.prompt_ids) + len(each.completion_ids) for each in rows.train)
    epochs = config.sft.max_steps * config.sft.tokens_per_batch / tokens
    lines = [
        f"# rows: {len(rows.train):,} to learn, of {tokens:,} tokens; "
        f"{len(rows.held_out):,} held out",
        f"# {config.sft.max_steps:,} steps of {config.sft.tokens_per_batch:,} tokens: about "
        f"{epochs:,.2f} epochs",
        "# the first row, and what of it is learnt:",
        *_comments(tokenizer, _parts(rows.train[0])),
        f"# {config.model.name}: {model.num_parameters:,} parameters, computed in "
        f"{model.name_of_dtype} on {model.device}; weights, gradients and AdamW's moments take "
        f"{sizes.size_text(4 * sizes.MASTER * model.num_parameters)}, besides activations",
    ]
    print("\n".join([*lines, dump_config(config)]), end="")


def _parts(row: Sample) -> Iterable[tuple[str, list[int]]]:
    """What is read of a row, and what is learnt, in turn."""
    yield "read", row.prompt_ids
    observed = row.observed or [False] * len(row.completion_ids)
    for is_read, part in groupby(zip(observed, row.completion_ids, strict=True), itemgetter(0)):
        yield ("read" if is_read else "learnt"), [token for _, token in part]


def _comments(tokenizer: Any, parts: Iterable[tuple[str, Sequence[int]]]) -> list[str]:
    """Tokens as text with its special tokens, each line behind what its part is called."""
    from rhymeflow.observe.printable import printable  # loads rich

    parts = list(parts)
    width = max(len(name) for name, _ in parts)
    found = [
        f"#   {name:<{width}}| {line if len(line) <= _WIDTH else line[:_WIDTH] + ' ...'}"
        for name, ids in parts
        for line in printable(tokenizer.decode(ids, skip_special_tokens=False)).split("\n")
    ]
    if (left_out := len(found) - _LINES) > 0:
        found[_LINES // 2 : -_LINES // 2] = [f"#   ({left_out:,} more lines)"]
    return found


__all__ = ["dry_run", "sft_dry_run"]
