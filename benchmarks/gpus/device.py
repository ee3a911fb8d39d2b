"""Copies, noise, hashes and weights on one GPU; and what all parts share: times, random models.

A result is what was measured, the value, what is expected, and False if the value is wrong.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from benchmarks.gpus.exchange import exchange
from rhymeflow.config import Config, RolloutConfig
from rhymeflow.config.load import read_config
from rhymeflow.engine.base import Sampling
from rhymeflow.engine.native import noise, sampler
from rhymeflow.learner.logprobs import TokenScorer
from rhymeflow.models import load
from rhymeflow.models.lm_head import LMHead
from rhymeflow.utils import shared_memory
from rhymeflow.weights.install import Installation
from rhymeflow.weights.manifest import Slab, manifest_of, slot_bytes
from rhymeflow.weights.on_device import as_ints, hash_of
from rhymeflow.weights.proof import bytes_of, digest
from rhymeflow.weights.shared_memory import SharedMemoryWeightStore
from tests.characters import make_tokenizer

Results = Iterator[tuple[Any, ...]]
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "max_position_embeddings": 512,
    "eos_token_id": 1, "bos_token_id": 0,
}  # fmt: skip
"""How `random:tiny`, by which parts are tried without a GPU, differs from Qwen3-1.7B."""


def sized(args: argparse.Namespace, full: int, tiny: int) -> int:
    """A size of the part, or that for `random:tiny`."""
    return tiny if args.model == "random:tiny" else full


def configured(args: argparse.Namespace, name: str, fields: Any = (), **shape: int) -> Config:
    """The configuration of a part; its model is `--model`, or else `name`, with this `shape`."""
    name = (args.model or name).removeprefix("random:")
    file = load._ARCHITECTURES / f"Qwen--{'Qwen3-1.7B' if name == 'tiny' else name}.json"
    values = json.loads(file.read_text()) | shape | (TINY if name == "tiny" else {})
    folder = mkdtemp(dir=args.folder)
    Path(folder, "config.json").write_text(json.dumps(values))
    make_tokenizer("0123456789+=?", values["max_position_embeddings"]).save_pretrained(folder)
    given = {"model.name": folder, "model.device": args.device, "model.dtype": "bfloat16"}
    return read_config("demo", given | dict(fields))


def drawn(config: Config, dtype: torch.dtype = torch.bfloat16) -> Any:
    device = torch.device(config.model.device)
    return load.random_model(config.model, dtype=dtype, device=device, seed=0)


def once(work: Callable[[], object]) -> float:
    """Seconds, also of what it started on the GPU."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    started = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - started


def seconds(work: Callable[[], object]) -> float:
    """The least of three times after a warm-up."""
    return min([once(work) for _ in range(4)][1:])


def peak_gb(work: Callable[[], object]) -> float:
    """By how much the GPU's memory rises meanwhile; 0 on CPUs."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    before, _ = torch.cuda.memory_allocated(), once(work)
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def machine(args: argparse.Namespace) -> Results:
    num_bytes, size = sized(args, 1 << 30, 1 << 20), sized(args, 8192, 64)
    here = torch.ones(num_bytes, dtype=torch.uint8)
    there, pinned = here.to(args.device), here.pin_memory() if args.device == "cuda" else here
    for what, to, source, expected in (
        ("on the device", there, there.clone(), "1500: 3000 read and written"),
        ("to it, pageable", there, here, "3 to 8"),
        ("from it, pageable", here, there, "3 to 8"),
        ("to it, pinned", there, pinned, "50"),
        ("from it, pinned", pinned, there, "50"),
    ):
        yield f"copy {what}: GB/s", num_bytes / 1e9 / seconds(partial(to.copy_, source)), expected
    x = torch.ones(size, size, device=args.device, dtype=torch.bfloat16)
    yield "bfloat16 product: TFLOP/s", 2 * size**3 / seconds(lambda: x @ x) / 1e12, "790"
    if args.device == "cpu" or torch.cuda.device_count() > 1:
        what, rate, ok = exchange(args.device, sized(args, 1 << 28, 1 << 16))
        yield what, rate, "100 by NVLink, 10 by PCIe", ok


def draws(args: argparse.Namespace) -> Results:
    words = sized(args, 151_936, 512)
    keys, x_RV = noise.row_keys(range(66), [0] * 66, torch.device("cpu")), torch.randn(66, words)
    found = noise.draw(x_RV.to(args.device), keys.to(args.device)).cpu()
    same = int((found == noise.draw(x_RV, keys)).sum())
    yield "tokens as the CPU's, of 66", same, "66", same == 66
    for rows, ms, gb in ((256, "1", "0.4"), (4352, "6", "2, drawn in parts")):
        count, how = sized(args, rows, rows // 64), Sampling(0.8, 1.0, 0, 1, frozenset())
        logits_RV = torch.randn(count, words, device=args.device)
        work = partial(
            sampler.sample, logits_RV, [sampler.Draws(how, i, [0]) for i in range(count)]
        )
        yield f"{count} rows sampled at temperature 0.8: ms", 1e3 * seconds(work), ms
        yield f"{count} rows: GB beside the logits", peak_gb(work), gb


def hashes(args: argparse.Namespace) -> Results:
    tensor = torch.randn(sized(args, 1 << 31, 1 << 16), device=args.device).bfloat16()
    slab = Slab(0, tensor.nbytes)
    same = as_ints([hash_of(tensor, slab)]) == [digest(bytes_of(tensor))]
    yield "hash as the CPU's", same, "", same
    rate = tensor.nbytes / 1e9 / seconds(lambda: hash_of(tensor, slab))
    yield f"hash of {len(tensor):,} numbers: GB/s", rate, "100 to 300; as one kernel 1000"


def weights(args: argparse.Namespace) -> Results:
    tensors = {n: t.detach() for n, t in drawn(configured(args, "Qwen3-8B")).named_parameters()}
    gb = slot_bytes(manifest := manifest_of(tensors)) / 1e9
    if 2.2e9 * gb > (free := shutil.disk_usage(shared_memory.DIRECTORY).free):
        sys.exit(f"skipped: /dev/shm has {free / 1e9:.1f} GB, {2.2 * gb:.1f} are needed")
    with closing(SharedMemoryWeightStore(manifest, keep=2)) as store:
        store.publish(0, tensors)
        held = Installation({name: torch.empty_like(each) for name, each in tensors.items()})
        reader, large = store.handle.open(), f"the 65.5 GB of 32B at this rate after {gb:.3g} GB: s"
        yield "pull, whole: s", (whole := once(lambda: held.pull(reader, 0))), "0.5"
        yield large, whole * 65.5 / gb, "2"
        for each in tensors.values():
            each.view(-1)[::100] += 1
        yield "publish, 1% changed: s", (taken := once(lambda: store.publish(1, tensors))), "0.4"
        yield large, taken * 65.5 / gb, "1.5"
        while not reader.prepare(held.holds, 1):
            time.sleep(0.001)
        yield "pull, 1% changed: s", once(lambda: held.pull(reader, 1)), "0.2"


def head(args: argparse.Namespace) -> Results:
    model = drawn(configured(args, "Qwen3-8B", num_hidden_layers=1))
    words, width = model.get_output_embeddings().weight.shape
    scorer, lm_head = TokenScorer(model, RolloutConfig(), 0), LMHead(model, many_rows=True)
    for rows, ms in ((1024, "11.8"), (4096, "32")):
        count = sized(args, rows, rows // 64)
        hidden_CD = torch.randn(count, width, device=args.device).bfloat16().requires_grad_()
        targets_C = torch.arange(count, device=args.device) % words
        logprobs = partial(scorer._head, lm_head, hidden_CD, targets_C)
        taken = seconds(lambda logprobs=logprobs: logprobs()[0].sum().backward())  # type: ignore[misc]
        yield f"{count} rows, forward and backward: ms", 1e3 * taken, ms
