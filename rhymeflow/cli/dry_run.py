"""A dry run: prints training data, required memory and devices, and the configuration.

All but the configuration are comments, so the output is a YAML file with the same configuration.
Text of data and templates is escaped.
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
from rhymeflow.errors import UserError, counted
from rhymeflow.placement import gpus_here, share_of_cores, with_memory_share
from rhymeflow.utils.cores import cores_of_ranks
from rhymeflow.utils.disk import size_text

if TYPE_CHECKING:
    from rhymeflow.check import Checked
    from rhymeflow.learner.sample import Sample
    from rhymeflow.memory import ModelSize

_MAX_LINES, _MAX_WIDTH = 24, 300
"""Most lines of a text that are shown (its first and last ones), and most characters of a line."""


def dry_run(config: Config, *, is_full: bool) -> None:
    """Print what `config` would do; with `is_full` read the data too. Raises what `train` would."""
    from rhymeflow import check
    from rhymeflow.runtime.start import check_run_dir, check_start, choose_run_dir

    lines: list[str] = []
    longest = None
    num_gpus = 0
    run_dir = choose_run_dir(config)
    check_run_dir(run_dir)
    if is_full:
        check_start(config)
        num_gpus = _cluster(config, lines) if check.is_elsewhere(config) else 0
        loaded = check.everything(config)
        longest = loaded.longest_prompt
        lines += _training_data(config, loaded)
    if config.cluster.nodes is not None:
        from rhymeflow import cluster

        needs = cluster.describe(config)
    else:
        from rhymeflow import memory  # loads torch; mistakes above are reported before

        here, device = check.as_here(config), config.model.device
        if config.runtime == "local":
            here = with_memory_share(here, len(gpus_here(config)))
        is_cuda = device == "cuda" or (device == "auto" and num_gpus > 0)
        on_gpus = is_cuda and check.is_elsewhere(config)
        model = memory.model_on_gpus(config) if on_gpus else memory.model_here(here)
        needs = _needs(here, model, longest)
        if is_full and config.runtime == "local":
            _check_room(config, model, run_dir.absolute())
    print("\n".join([*lines, needs.strip("\n"), dump_config(config)]), end="")


def _cluster(config: Config, lines: list[str]) -> int:
    """Ask the nodes of a cluster, and add to `lines` what they say or why they were not asked;
    return the number of their GPUs that is known."""
    from rhymeflow.runtime.ray.library import NotReachable, num_gpus_of_nodes

    try:
        found = num_gpus_of_nodes(config)
    except NotReachable as error:
        lines.append("# not checked, for no cluster answers: GPUs of nodes, their torch and vLLM")
        lines.append(f"#   {error}")
        return 0
    lines.append(f"# the cluster has {counted(found, 'GPU')} now; its nodes can run workers")
    return found


def _needs(config: Config, model: ModelSize, longest_prompt: int | None) -> str:
    """Return sizes, memory and placement; `longest_prompt` in tokens, if the data was read."""
    from rhymeflow import memory

    length = longest_prompt or config.data.max_prompt_length or memory.ASSUMED_PROMPT
    origin = "by data.max_prompt_length"
    if longest_prompt is not None:
        origin = "as the data has them"
    elif config.data.max_prompt_length is None:
        origin = "an assumption (data.max_prompt_length says otherwise)"
    parts = memory.here(config, model, length)
    groups, members = config.learner.groups_per_batch, config.rollout.num_generations
    lines = [
        f"{config.model.name}: {model.num_parameters:,} parameters, computed in "
        f"{model.name_of_dtype} on {model.device}",
        f"{config.learner.max_steps} steps of {groups * members} trajectories "
        f"({groups} prompts x {members})",
        f"prompts of up to {length:,} tokens, {origin}",
        "workers:",
        *(f"  {name:<18} {place}" for name, place in placement(config, model.device)),
        "memory:",
        *(
            f"  {process:<18} {part.what:<44} {size_text(part.num_bytes):>9}"
            for process, part in parts
        ),
        f"  {'total':<63} {size_text(memory.total(part for _, part in parts)):>9}",
        "  besides: about 0.5 GB for Python and torch in each process",
    ]
    return "\n".join(f"# {line}" for line in lines)


def placement(config: Config, device: str) -> list[tuple[str, str]]:
    """Return (name, text about device, threads and cores) of each process that computes."""
    rollout, learner = config.rollout, config.learner
    cores = rollout.cpus or (None,) * rollout.num_instances
    ranks = cores_of_ranks(learner.cpus, learner.num_ranks)
    names = ["learner", *(f"learner rank {rank}" for rank in range(1, learner.num_ranks))]
    workers = [(n, learner.num_threads, each) for n, each in zip(names, ranks, strict=True)]
    workers += [(f"rollout-{n}", rollout.num_threads, each) for n, each in enumerate(cores)]
    places = []
    for name, threads, cpus in workers:
        count = threads or (len(cpus) if cpus else None)
        if count is None:
            count = share_of_cores(config) if config.runtime == "local" else 1
        said = counted(count, "thread")
        if config.runtime == "ray" and threads is None and device != "cpu":
            said = "threads by the cores for a GPU of its node"
        pinned = f", pinned to cores {', '.join(map(str, cpus))}" if cpus else ""
        places.append((name, f"{device}, {said}{pinned}"))
    places.append(("reward functions", f"cpu, {counted(config.reward.num_workers, 'process')}"))
    if config.drafting.window != "off":
        places.append(("history", "cpu, 1 thread"))
    return places


def _check_room(config: Config, model: ModelSize, run_dir: Path) -> None:
    """Raise `UserError` if disk or shared memory are too small for the model."""
    from rhymeflow import memory
    from rhymeflow.runtime import disk_space
    from rhymeflow.store.checkpoint_dirs import is_url
    from rhymeflow.utils import shared_memory
    from rhymeflow.workers.learner import STATE_BYTES

    checkpoint_bytes = model.num_trained * (model.bytes_per_value + STATE_BYTES)
    place = Path(config.run.checkpoint_dir or run_dir).absolute()
    if not is_url(config.run.checkpoint_dir or ""):
        existing = next(each for each in (place, *place.parents) if each.exists())
        disk_space.DiskSpace(existing, checkpoint_bytes).check(config.run.save_total_limit, 0)
    shared_bytes, directory = memory.shared(config, model), shared_memory.DIRECTORY
    if directory.is_dir() and disk_space.free_bytes(directory) < shared_bytes:
        raise UserError(
            f"{directory} has {size_text(disk_space.free_bytes(directory))} free, and "
            "weights and the index of history (drafting.history_tokens) take "
            f"{size_text(shared_bytes)} there"
        )


def _training_data(config: Config, loaded: Checked) -> list[str]:
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
        *(f"# reward {shortened(each, _MAX_WIDTH)}" for each in loaded.rewards),
        *(f"# {shortened(each, _MAX_WIDTH)}" for each in loaded.notes),
    ]


def sft_dry_run(config: Config) -> None:
    """Print what `sft` would train on. Raises the `UserError` of `sft` before its first step."""
    from rhymeflow import memory  # loads torch
    from rhymeflow.check import prove
    from rhymeflow.environments.template import load_settled
    from rhymeflow.sft.train import check, load

    check(config)
    prove(config, has_engine=False)
    model = memory.model_here(config)
    tokenizer, settled = load_settled(config)
    samples, held_out = load(config, tokenizer)
    tokens = sum(len(each.prompt_ids) + len(each.completion_ids) for each in samples)
    epochs = config.sft.max_steps * config.sft.tokens_per_batch / tokens
    state_bytes = 4 * memory.MASTER * model.num_trained  # weights, gradients and two moments
    lines = [
        *([] if settled is None else [f"# {settled}"]),
        f"# rows: {len(samples):,} to learn, of {tokens:,} tokens; {len(held_out):,} held out",
        f"# {config.sft.max_steps:,} steps of {config.sft.tokens_per_batch:,} tokens: about "
        f"{epochs:,.2f} epochs",
        "# the first row, and what of it is learnt:",
        *_comments(tokenizer, _parts(samples[0])),
        f"# {config.model.name}: {model.num_parameters:,} parameters, computed in "
        f"{model.name_of_dtype} on {model.device}; weights, gradients and AdamW's moments take "
        f"{size_text(state_bytes)}, besides activations",
    ]
    print("\n".join([*lines, dump_config(config)]), end="")


def _parts(row: Sample) -> Iterable[tuple[str, list[int]]]:
    """Yield the parts of a row as tokens, each labelled `read` or `learnt`."""
    yield "read", row.prompt_ids
    observed = row.observed or [False] * len(row.completion_ids)
    for is_read, part in groupby(zip(observed, row.completion_ids, strict=True), itemgetter(0)):
        yield ("read" if is_read else "learnt"), [token for _, token in part]


def _comments(tokenizer: Any, parts: Iterable[tuple[str, Sequence[int]]]) -> list[str]:
    """Return tokens as comment lines of text with special tokens, labelled by part."""
    from rhymeflow.observe.printable import printable  # loads rich

    parts = list(parts)
    width = max(len(name) for name, _ in parts)
    lines = [
        f"#   {name:<{width}}| {line if len(line) <= _MAX_WIDTH else line[:_MAX_WIDTH] + ' ...'}"
        for name, ids in parts
        for line in printable(tokenizer.decode(ids, skip_special_tokens=False)).split("\n")
    ]
    if (left_out := len(lines) - _MAX_LINES) > 0:
        lines[_MAX_LINES // 2 : -_MAX_LINES // 2] = [f"#   ({left_out:,} more lines)"]
    return lines
