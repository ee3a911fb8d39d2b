"""Timings of the run's engine: decode iterations, tokens prefilled, pulls.

Holds true: what is timed is `Engine.step()` with the run's model, precision, sampling and prompts,
in states that a run goes through. A state is `max_num_seqs` responses at one length, as after a
start in step, or spread from nothing to a length, many short and few long, as when they start one
by one; from there some are taken away, as when they end. States come in another order in each pass,
with other prompts and other lengths: a run never prefills the same shapes twice, and libraries
prepare for each new one. Knows nothing of fits.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rhymeflow.calibration import clock
from rhymeflow.calibration.fit import DecodeTiming
from rhymeflow.config import Config
from rhymeflow.data.encode import PromptEncoder
from rhymeflow.data.load import load_prompts
from rhymeflow.engine.base import Request, Sampling
from rhymeflow.engine.native.engine import Engine
from rhymeflow.engine.native.noise import NoiseKey
from rhymeflow.models.load import load_model, load_tokenizer, resolve_device, resolve_dtype
from rhymeflow.weights.install import install
from rhymeflow.weights.manifest import manifest_of
from rhymeflow.weights.shared_memory import SharedMemoryWeightReader, SharedMemoryWeightStore

PASSES = 3
"""Times each state is measured; the median counts."""

STEPS = 8
"""Iterations timed at each point of a pass; the median counts."""

PULLS = 5

SKEW = 3
"""Spread responses are at the longest times u ** SKEW, u uniform: the mean is a quarter of the
longest, as it is of responses in flight whose lengths are about exponential."""


class State(NamedTuple):
    """How long the responses are when timing begins, as shares of the longest."""

    shortest: float
    longest: float
    held_out: bool = False
    """Only to see how good the fit is."""


STATES = (
    State(0.0, 0.0),
    State(0.12, 0.12),
    State(0.3, 0.3, held_out=True),
    State(0.45, 0.45),
    State(0.9, 0.9),
    State(0.0, 0.3),
    State(0.0, 0.6, held_out=True),
    State(0.0, 0.95),
)


class Prefill(NamedTuple):
    """Tokens prefilled until all responses decode; those that are ready decode in the meantime."""

    tokens: int
    """Prompts, once for a group, and what there is of the responses."""
    seconds: float
    iterations: tuple[tuple[int, int], ...]
    """How many decoded in each iteration, and the tokens in the cache before it."""


class EngineTimings(NamedTuple):
    """Everything measured of one instance."""

    decode: list[DecodeTiming]
    held_out: list[DecodeTiming]
    prefills: list[Prefill]
    pulls: list[float]
    kv_capacity: int
    """Tokens that the instance holds at most."""
    waited: float
    """Share of the time in which it could have run and another program did."""


class EngineBench:
    """The engine of a configuration, and what it is given."""

    def __init__(self, config_json: str) -> None:
        config = Config.model_validate_json(config_json)
        self.rollout, self.seed = config.rollout, config.run.seed
        device = resolve_device(config.model)
        dtype = resolve_dtype(config.model, device)
        self.model = load_model(config.model, dtype=dtype, device=device)
        self.engine = Engine(
            self.model,
            seed=self.seed,
            max_num_seqs=self.rollout.max_num_seqs,
            max_prefill_tokens=self.rollout.max_prefill_tokens,
            instance="calibrate",
            version=0,
        )
        prompts, _ = load_prompts(config.data, self.seed)
        encoder = PromptEncoder(load_tokenizer(config.model), config.data)
        self.num_groups = -(-self.rollout.max_num_seqs // self.rollout.num_generations)
        num_prompts = min(len(prompts), self.num_groups * len(STATES) * (1 + PASSES))
        self.prompts = [encoder.encode(prompts[i]) for i in range(num_prompts)]
        self._descents = 0
        self.sizes = _descent(self.rollout.max_num_seqs)
        longest = max(map(len, self.prompts))
        room = self.engine.max_length - longest
        self.steps = max(1, min(STEPS, room // (2 * len(self.sizes))))
        # The room that the engine itself needs to prefill a state and to go through the sizes.
        self.longest = max(
            0, min(self.rollout.max_completion_length, room - self.steps * len(self.sizes) - 32)
        )
        limit = self.rollout.max_kv_tokens
        most = self.rollout.max_num_seqs * (longest + self.rollout.max_completion_length)
        self.kv_capacity = most if limit is None else limit

    def measure(self) -> EngineTimings:
        """Take all timings."""
        watch = clock.Watch()
        for state in STATES:
            self._descend(state)  # warm-up: the cache's memory, the kernels of these shapes
        decode: dict[State, dict[int, list[DecodeTiming]]] = defaultdict(lambda: defaultdict(list))
        prefills = []
        for number in range(PASSES):
            order = list(STATES)
            random.Random(number).shuffle(order)
            for state in order:
                prefill, timings = self._descend(state)
                prefills.append(prefill)
                for timing in timings:
                    decode[state][timing.n].append(timing)
        points = {
            held_out: [
                _middle(repeats)
                for state, found in decode.items()
                if state.held_out == held_out
                for repeats in found.values()
            ]
            for held_out in (False, True)
        }
        return EngineTimings(
            points[False],
            points[True],
            prefills,
            self._pulls(),
            self.kv_capacity,
            watch.share_waited(),
        )

    def work(self) -> None:
        """Go through a state, untimed."""
        self._descend(STATES[-1])

    def _descend(self, state: State) -> tuple[Prefill, list[DecodeTiming]]:
        """Bring the engine into a state, then time its iterations with fewer and fewer."""
        chance = random.Random(self._descents)
        prefill = self._prefill(list(self._requests(state, chance)))
        self._descents += 1
        timings = []
        for size in self.sizes:
            ids = self.engine.request_ids()
            self.engine.interrupt(chance.sample(ids, len(ids) - size))
            kv_tokens = self.engine.kv_tokens
            seconds = [_timed(self.engine.step) for _ in range(self.steps)]
            middle = kv_tokens + size * self.steps // 2
            timings.append(DecodeTiming(size, middle, statistics.median(seconds)))
        self.engine.interrupt()
        return prefill, timings

    def _requests(self, state: State, chance: random.Random) -> Iterator[Request]:
        vocabulary = self.model.config.vocab_size
        first, spread = self._descents * self.num_groups, state.longest - state.shortest
        jitter = chance.uniform(0.95, 1.05)
        for i in range(self.rollout.max_num_seqs):
            group, member = divmod(i, self.rollout.num_generations)
            prompt = self.prompts[(first + group) % len(self.prompts)]
            share = state.shortest + spread * chance.random() ** SKEW
            length = int(min(1.0, share * jitter) * self.longest)
            tokens = [chance.randrange(vocabulary) for _ in range(length)]
            sampling = Sampling(
                temperature=self.rollout.temperature,
                top_p=self.rollout.top_p,
                top_k=self.rollout.top_k,
                max_new_tokens=self.engine.max_length - len(prompt),
                stop_token_ids=frozenset(),
            )
            key = NoiseKey(group, 0, member)
            yield Request(i, prompt, key, sampling, tokens, [0.0] * length)

    def _prefill(self, requests: list[Request]) -> Prefill:
        """Submit requests and iterate until all of them decode."""
        for request in requests:
            self.engine.submit(request)
        tokens = _computed(requests)
        started, iterations, decoding = clock.now(), [], 0
        while decoding < len(requests):
            iterations.append((decoding, self.engine.kv_tokens))
            before = self.engine.tokens_generated
            self.engine.step()
            decoding = self.engine.tokens_generated - before
        seconds = clock.now() - started
        return Prefill(tokens, seconds, tuple(iterations))

    def _pulls(self) -> list[float]:
        """Pull as an instance does: copy, prove, lay out anew."""
        weights = dict(self.model.named_parameters())
        store = SharedMemoryWeightStore.create(
            manifest_of({k: v.detach() for k, v in weights.items()})
        )
        try:
            reader = SharedMemoryWeightReader(store.handle)
            seconds = []
            for version in range(1 + PULLS):
                store.publish(version, {k: v.detach() for k, v in weights.items()})
                started = clock.now()
                self.engine.set_version(install(reader, weights).version, keep_cache=False)
                seconds.append(clock.now() - started)
        finally:
            store.close()
        return seconds[1:]


def _descent(most: int) -> list[int]:
    """Numbers of responses from `most` down to 1, closer together where there are few."""
    sizes, size = [], float(most)
    while size >= 1:
        sizes.append(round(size))
        size *= 0.72
    return list(dict.fromkeys([*sizes, 1]))


def _computed(requests: list[Request]) -> int:
    """Tokens that must be run: of requests with one prompt a single one computes it."""
    prompts = {tuple(request.prompt_ids) for request in requests}
    return sum(map(len, prompts)) + sum(len(request.tokens) for request in requests)


def _middle(repeats: list[DecodeTiming]) -> DecodeTiming:
    """The repeat whose time is the median."""
    return sorted(repeats, key=lambda timing: timing.seconds)[len(repeats) // 2]


def _timed(call: Callable[[], object]) -> float:
    started = clock.now()
    call()
    return clock.now() - started


__all__ = ["EngineBench", "EngineTimings", "Prefill"]
