"""What a fake run computes: a policy, an engine, a learner's model and rewards, all of them hashes.

A token is a function of its response's noise key and position, as in a real run it is one of these
and the logits; weights are a function of everything that was trained on, in its order, so two
learners with the same checksum were trained on the same; a reward is one of the tokens.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import xxhash

from rhymeflow.config import Config
from rhymeflow.core.types import Version
from rhymeflow.data.load import RunPrompts
from rhymeflow.data.prompts import Prompt
from rhymeflow.data.stream import PromptStream
from rhymeflow.engine.base import EngineLimits, Finished, Load, NoiseKey, Request
from rhymeflow.histospec.draft import DraftStats
from rhymeflow.learner.sample import Sample
from rhymeflow.runtime.reporting import Reporter
from rhymeflow.runtime.train import Loaded
from rhymeflow.store.checkpoint_dirs import CheckpointDir
from rhymeflow.suites.suite import SuitePrompts, of_run
from rhymeflow.weights.base import VersionUnavailable
from rhymeflow.weights.proof import ProvedWeights
from rhymeflow.weights.publish import BegunPublication

STOP = 0
STATE_FILE = "state.json"


def token(key: NoiseKey, position: int) -> int:
    """The token that this noise gives here; `STOP` for one in six."""
    hashed = zlib.crc32(struct.pack("<4q", *key, position))
    return STOP if hashed % 6 == 0 else 1 + hashed % 97


def response(key: NoiseKey, length: int) -> list[int]:
    """All tokens of a response of at most `length`."""
    tokens: list[int] = []
    while len(tokens) < length and STOP not in tokens:
        tokens.append(token(key, len(tokens)))
    return tokens


def reward(tokens: Sequence[int]) -> float:
    """0, 0.5 or 1."""
    return zlib.crc32(bytes(tokens)) % 3 / 2


class Weights:
    """What a learner has published: the memory that instances read."""

    def __init__(self) -> None:
        self._published: ProvedWeights | None = None
        self._asked = 0

    @property
    def metrics(self) -> dict[str, float]:
        return {}

    def prepare(self, have: ProvedWeights, want: Version) -> bool:
        """Not at once, so that commands wait for a pull."""
        self._asked += 1
        return self._asked % 3 == 0

    def begin(self, state: int) -> BegunPublication:
        return BegunPublication(lambda into: None, lambda: [state], None)

    def finish(self, version: Version, begun: BegunPublication) -> int:
        (state,) = begun.digests()
        self._published = ProvedWeights(version, state)
        return state

    def publish(self, version: Version, state: int) -> int:
        return self.finish(version, self.begin(state))

    def newest(self, want: Version) -> ProvedWeights:
        if self._published is None or self._published.version < want:
            raise VersionUnavailable(f"{want} of {self._published}")
        return self._published


class Model:
    """Stands for `learner.learner.Learner`."""

    def __init__(self) -> None:
        self.version: Version = 0
        self.state = self.num_of_critic = 0
        self._num_tokens = 0
        self._early: list[Sequence[Sample]] = []
        self.skipped: dict[int, str] = {}
        self.charged: Counter[str] = Counter()
        self.breaks: Callable[[int], bool] = lambda digest: False
        """Whether the gradient of a step, from which a state of this digest would follow, is not
        finite. A learner that is restored does not ask: the log knows."""

    def accumulate(self, samples: Sequence[Sample], details: Any = None) -> None:
        self._early.append(samples)

    def forget(self) -> None:
        self._early = []

    def train(
        self,
        rest: Sequence[Sample],
        step: Version,
        details: Any = None,
        *,
        skip: Collection[int] = (),
    ) -> dict:
        assert step == self.version, (step, self.version)
        parts, self._early = [*self._early, rest], []
        samples = [sample for part in parts for sample in part]
        known = [
            [
                (s.group, s.prompt_ids, s.completion_ids, s.logprobs, s.versions, s.reward)
                for s in part
            ]
            for part in parts
        ]
        digest = xxhash.xxh3_64_intdigest(repr((self.state, known)).encode())
        self.skipped = {0: "the gradient is not finite"} if self.breaks(digest) else {}
        if not skip and not self.skipped:
            self.state = digest
        self.version = step + 1
        self._num_tokens += sum(len(sample.completion_ids) for sample in samples)
        mean = sum(sample.reward for sample in samples) / len(samples)
        length = sum(len(sample.completion_ids) for sample in samples) / len(samples)
        return {
            "loss": self.state % 1000 / 1000,
            "reward": mean,
            "num_tokens": float(self._num_tokens),
            "completions/mean_length": length,
        }

    def reconfigure(self, config: Any) -> None:
        pass

    def rows(self) -> int:
        return self.state

    checksum = rows

    def snapshot(self) -> str:
        return json.dumps([self.version, self.state, self._num_tokens])

    def restore(self, saved: CheckpointDir) -> None:
        self.version, self.state, self._num_tokens = json.loads(
            (Path(str(saved)) / STATE_FILE).read_text(encoding="utf-8")
        )


class Engine:
    """A `RolloutEngine` that generates a token of each running response in an iteration."""

    def __init__(self, weights: Weights, limits: EngineLimits) -> None:
        self._limits, self._requests = limits, dict[Hashable, Request]()
        self._clock, self._num_generated = 0.0, 0
        self.install(weights, 0, keep_cache=False)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def limits(self) -> EngineLimits:
        return self._limits

    def load(self) -> Load:
        ids, room = list(self._requests), self._limits.max_num_seqs
        kv_tokens = sum(len(r.prompt_ids) + len(r.tokens) for r in self._requests.values())
        return Load(
            len(ids[:room]),
            tuple(ids[room:]),
            kv_tokens,
            self._clock,
            self._num_generated,
            DraftStats(),
            0.0,
        )

    def submit(self, request: Request) -> None:
        assert request.id not in self._requests, f"{request.id} is here twice"
        self._requests[request.id] = request

    def poll(self, timeout: float) -> list[Finished]:
        done = []
        for request in list(self._requests.values())[: self._limits.max_num_seqs]:
            request.tokens.append(token(request.noise_key, len(request.tokens)))
            request.logprobs.append(-1.0)
            request.steps += 1
            self._num_generated += 1
            if reason := request.finish_reason():
                del self._requests[request.id]
                done.append(Finished(request, reason))
        self._clock += 1.0
        return done

    def interrupt(self, ids: Iterable[Hashable] | None = None) -> list[Request]:
        chosen = list(self._requests) if ids is None else ids
        return [self._requests.pop(each) for each in chosen if each in self._requests]

    def prepare(self, weights: Weights, want: Version) -> bool:
        return weights.prepare(ProvedWeights(self.version, self.checksum), want)

    def install(self, weights: Weights, want: Version, *, keep_cache: bool) -> ProvedWeights:
        pulled = weights.newest(want)
        self.version, self.checksum = pulled
        return pulled

    def draft_from(self, index: Any) -> None:
        pass

    def close(self) -> None:
        pass


NUM_PROMPTS, HELD_OUT = 7, 2


class Letters:
    """A prompt's tokens."""

    writes_date = False
    most_tokens = 100

    def encode(self, prompt: Prompt) -> list[int]:
        return [ord(letter) for letter in str(prompt.prompt)]


SOURCE = [Prompt(row, "ab" * (row + 1), {"answer": row}) for row in range(NUM_PROMPTS)]
ANSWERS = [Prompt(row, "q" * (row + 1), {}) for row in range(HELD_OUT)]


def load(start: Callable[[], None], config: Config, reporter: Reporter) -> Loaded:
    """The prompts of every fake run; as `runtime.train.load_while`."""
    start()
    held_out = ANSWERS[: config.data.eval_size]
    stream = PromptStream(SOURCE, config.run.seed, config.data.shuffle)
    ids = [Letters().encode(prompt) for prompt in ANSWERS]
    suites = {
        each.name: SuitePrompts(each.section, each.config, ANSWERS, ids, Letters())
        for each in of_run(config)
    }
    prompts = RunPrompts(SOURCE, stream, Letters(), held_out)
    return Loaded(SimpleNamespace(chat_template=None), prompts, suites)
