"""Timings of the run's learner: training steps and pushes.

Holds true: what is timed is `Learner.train` with the run's model, precision and objective, on whole
groups of which each has something to learn from; and, apart, on groups whose rewards are all equal.
Knows nothing of fits.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from typing import NamedTuple

import torch

from rhymeflow.calibration import clock
from rhymeflow.config import Config
from rhymeflow.data.encode import PromptEncoder
from rhymeflow.data.load import load_prompts
from rhymeflow.learner.learner import Learner
from rhymeflow.learner.sample import Sample
from rhymeflow.models.load import load_model, load_tokenizer, resolve_device, resolve_dtype
from rhymeflow.weights.manifest import manifest_of
from rhymeflow.weights.shared_memory import SharedMemoryWeightStore

PASSES = 3
"""Times each size of a batch is trained on; the median counts."""

PUSHES = 5


class Size(NamedTuple):
    """A batch: its share of the run's groups, and of the longest response on average."""

    groups: float
    length: float
    held_out: bool = False
    """Only to see how good the fit is."""
    still: bool = False
    """The rewards of each group are all equal."""


SIZES = (
    Size(0.5, 0.1),
    Size(0.25, 0.45),
    Size(0.5, 0.3, held_out=True),
    Size(1.0, 0.1),
    Size(0.75, 0.35),
    Size(1.0, 0.2, held_out=True),
    Size(0.5, 0.1, still=True),
    Size(0.5, 0.35, still=True),
)
"""Most batches of most runs are of short responses: the longest there may be is seldom reached."""


class TrainTiming(NamedTuple):
    """One training step on `tokens` tokens: prompts and responses of all samples."""

    tokens: int
    seconds: float


class LearnerTimings(NamedTuple):
    """Everything measured of the learner."""

    train: list[TrainTiming]
    held_out: list[TrainTiming]
    still: list[TrainTiming]
    """Of batches with nothing to learn from."""
    pushes: list[float]
    waited: float
    """Share of the time in which it could have run and another program did."""


class LearnerBench:
    """The learner of a configuration, and batches for it."""

    def __init__(self, config_json: str) -> None:
        config = Config.model_validate_json(config_json)
        device = resolve_device(config.model)
        self.learner = Learner(
            load_model(config.model, dtype=torch.float32, device=device),
            None,
            config.learner,
            config.rollout,
            resolve_dtype(config.model, device),
        )
        prompts, _ = load_prompts(config.data, config.run.seed)
        encoder = PromptEncoder(load_tokenizer(config.model), config.data)
        groups = config.learner.groups_per_batch
        encoded = [encoder.encode(prompts[i % len(prompts)]) for i in range(groups)]
        vocabulary = self.learner.model.config.vocab_size
        self.batches = {size: list(_batch(config, size, encoded, vocabulary)) for size in SIZES}

    def measure(self) -> LearnerTimings:
        """Take all timings."""
        watch = clock.Watch()
        self.work()  # warm-up
        found: dict[Size, list[float]] = {size: [] for size in SIZES}
        for number in range(PASSES):
            order = list(SIZES)
            random.Random(number).shuffle(order)
            for size in order:
                started = clock.now()
                self.learner.train(self.batches[size], 0)
                found[size].append(clock.now() - started)
        timings = {
            size: TrainTiming(_num_tokens(self.batches[size]), statistics.median(seconds))
            for size, seconds in found.items()
        }
        return LearnerTimings(
            [timing for size, timing in timings.items() if not (size.held_out or size.still)],
            [timing for size, timing in timings.items() if size.held_out],
            [timing for size, timing in timings.items() if size.still],
            _pushes(self.learner),
            watch.share_waited(),
        )

    def work(self) -> None:
        """Train on the smallest batch, untimed."""
        self.learner.train(self.batches[SIZES[0]], 0)


def _num_tokens(batch: list[Sample]) -> int:
    return sum(len(sample.prompt_ids) + len(sample.completion_ids) for sample in batch)


def _batch(
    config: Config, size: Size, prompts: list[list[int]], vocabulary: int
) -> Iterator[Sample]:
    """Groups of responses of random tokens, spread evenly around the mean length."""
    chance = random.Random(str(size))
    most = config.rollout.max_completion_length
    minibatches = config.learner.num_minibatches
    num_groups = max(1, round(size.groups * len(prompts) / minibatches)) * minibatches
    for group in range(num_groups):
        for member in range(config.rollout.num_generations):
            length = max(1, min(most, round(chance.uniform(0, 2 * size.length) * most)))
            yield Sample(
                group=group,
                prompt_ids=prompts[group],
                completion_ids=[chance.randrange(vocabulary) for _ in range(length)],
                logprobs=[-3.0] * length,
                versions=[0] * length,
                reward=0.0 if size.still else float(member % 2),
                truncated=False,
            )


def _pushes(learner: Learner) -> list[float]:
    weights = learner.weights()
    store = SharedMemoryWeightStore.create(manifest_of(weights))
    try:
        seconds = []
        for version in range(2 + PUSHES):
            started = clock.now()
            store.publish(version, weights)
            seconds.append(clock.now() - started)
    finally:
        store.close()
    return seconds[2:]  # the first two touch the memory of the two slots for the first time


__all__ = ["LearnerBench", "LearnerTimings", "TrainTiming"]
