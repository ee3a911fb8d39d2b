"""vLLM behind the seam of `engine/base.py`.

A request that was interrupted is submitted to vLLM as a prompt with the tokens it has; its noise
counts from the end of its own prompt. Requests of one version share prefixes, those of another
never do (vLLM's `cache_salt`), so with `keep` none begins on keys and values of old weights. Urgent
requests have places as in `native/scheduler.py`: of those that run, the one submitted last makes
way, and is the next to run again; of vLLM only its scheduling by priority is asked for.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from rhymeflow.config import Config
from rhymeflow.core.types import Version
from rhymeflow.engine.base import Finished, Limits, Load, Request, Segment
from rhymeflow.engine.drafter import Drafting
from rhymeflow.engine.native import noise
from rhymeflow.engine.native.scheduler import URGENT_SHARE
from rhymeflow.engine.vllm import self_test
from rhymeflow.engine.vllm.llm import Llm, Stepped
from rhymeflow.errors import UserError
from rhymeflow.histospec.draft import Draft, IndexHandle
from rhymeflow.histospec.drafter import Drafter
from rhymeflow.models.load import configured_stop_token_ids
from rhymeflow.models.precision import resolve_device
from rhymeflow.models.tokenizer import load_tokenizer
from rhymeflow.utils import objects
from rhymeflow.weights.base import StoreLost, WeightReader
from rhymeflow.weights.proof import Pulled

COMPARED_PULLS = 3
"""So many pulls, the one at the start included, are followed by a comparison with fresh layers."""

LOST_SECONDS = 0.1
"""Between attempts to bring to all workers what some of them have, while the learner is gone."""


@dataclass(slots=True)
class Entry:
    """A request inside the engine."""

    request: Request
    number: int
    """In the order of submission."""


class VllmEngine:
    """A `base.Engine`. It begins with the newest weights of `weights`.

    `drafter_for` makes a drafter of an index and of the most tokens that a prompt and its response
    can have.
    """

    def __init__(
        self,
        config: Config,
        weights: WeightReader,
        *,
        instance: str,
        drafter_for: Callable[[IndexHandle, int], Drafter],
    ) -> None:
        self._seed, self._instance, self._drafter_for = config.run.seed, instance, drafter_for
        self._llm = Llm(config)
        self.vocabulary = self._llm.vocabulary
        self._entries: dict[Hashable, Entry] = {}
        self._urgent: deque[Entry] = deque()
        """Those that vLLM has not been given yet, for want of a place."""
        self._num_submitted = 0
        self._num_generated, self._clock, self._prefill_seconds = 0, 0.0, 0.0
        self._timer = timer(config)
        rollout = config.rollout
        self._drafting = Drafting(vocabulary=self.vocabulary, max_sequences=rollout.max_num_seqs)
        self._is_here = rollout.vllm_tensor_parallel_size == 1
        """The only worker is in this process; else each opens a reader of its own."""
        self._num_pulls = 0
        if not self._is_here and objects.are_shared():
            self._llm.call("rhymeflow_join", objects.here().join)
        self._urgent_places = max(1, int(rollout.max_num_seqs * URGENT_SHARE))
        capacity = min(self._llm.kv_capacity, rollout.max_kv_tokens or self._llm.kv_capacity)
        stop = configured_stop_token_ids(config.model, load_tokenizer(config.model))
        self._limits = Limits(rollout.max_num_seqs, self._llm.max_length, capacity, stop)
        self._pulled = self._pull(weights, None)
        self_test.check(
            self,
            drafts=config.drafting.window != "off",
            has_sampler=rollout.vllm_model_runner == "v1",
        )
        self._num_generated, self._clock, self._prefill_seconds = 0, 0.0, 0.0
        self._llm.forget_cache()

    @property
    def version(self) -> Version:
        """The weights that it computes with."""
        return self._pulled.version

    @property
    def checksum(self) -> int:
        """Of the weights that it computes with, as they were proved."""
        return self._pulled.checksum

    @property
    def has_work(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self._entries)

    def limits(self) -> Limits:
        """What it can hold."""
        return self._limits

    def load(self) -> Load:
        """How it is now."""
        status = self._llm.status()
        return Load(
            status.running,
            (*status.waiting, *(entry.request.id for entry in self._urgent)),
            status.kv_tokens,
            self._clock,
            self._num_generated,
            self._drafting.stats(),
            self._prefill_seconds,
        )

    def submit(self, request: Request) -> None:
        """Queue a request; see `base.Engine`."""
        assert request.id not in self._entries, f"request {request.id} is here already"
        assert request.finish_reason() is None, f"request {request.id} is complete"
        prompt, new = len(request.prompt_ids), request.sampling.max_new_tokens
        if not prompt:
            raise UserError(f"request {request.id}: the prompt is empty")
        if prompt + new > self._limits.max_length:
            raise UserError(
                f"request {request.id}: {prompt} prompt tokens and up to {new} new ones are more "
                f"than the {self._limits.max_length} that vLLM takes (the model's "
                "max_position_embeddings, or rollout.vllm_max_model_length)"
            )
        self._num_submitted += 1
        entry = self._entries[request.id] = Entry(request, self._num_submitted)
        if request.is_urgent:
            self._urgent.append(entry)
        else:
            self._give(entry)

    def poll(self, timeout: float) -> list[Finished]:
        """Run one iteration, if there is anything to run; it never waits for more."""
        if not self._entries:
            return []
        if self._urgent:
            self._admit_urgent()
        self._propose()
        started = self._timer()
        stepped = self._llm.step()
        seconds = self._timer() - started
        decoded = len(stepped.tokens) + sum(stepped.drafted.values())
        self._prefill_seconds += seconds * max(stepped.rows - decoded, 0) / max(stepped.rows, 1)
        finished = self._take(stepped)
        self._drafting.observe(stepped.tokens, stepped.drafted, rows=stepped.rows, seconds=seconds)
        self._forget([request.id for request, _ in finished])
        return finished

    def interrupt(self, ids: Iterable[Hashable] | None = None) -> list[Request]:
        """Stop requests; see `base.Engine`."""
        chosen = list(self._entries) if ids is None else ids
        found = [self._entries[key] for key in chosen if key in self._entries]
        self._llm.abort([entry.request.id for entry in found])
        self._urgent = deque(entry for entry in self._urgent if entry not in found)
        self._forget([entry.request.id for entry in found])
        return [entry.request for entry in found]

    def prepare(self, weights: WeightReader, want: Version) -> bool:
        """Fetch what changed, if that can be put in; see `base.Engine`."""
        if self._is_here:
            return weights.prepare(self._pulled, want)
        found = self._llm.call("rhymeflow_prepare", weights.handle, want)
        for each in found:
            if isinstance(each, StoreLost):
                raise each
        return all(found)

    def install(self, weights: WeightReader, want: Version, *, keep_cache: bool) -> Pulled:
        """Have every worker pull; see `base.Engine`."""
        self._pulled = self._pull(weights, want)
        if not keep_cache:
            self._llm.forget_cache()
        return self._pulled

    def draft_from(self, index: IndexHandle) -> None:
        """Draft from this index; see `base.Engine`."""
        self.draft_with(self._drafter_for(index, self._limits.max_length))

    def draft_with(self, drafter: Drafter | None) -> None:
        """Draft from now on, also for what runs; None: no more."""
        self._drafting.use(drafter)
        self._llm.draft({})

    def num_draws(self) -> int:
        """How often our sampler was called, by the first worker's count; V1 only."""
        return int(self._llm.call("rhymeflow_samples")[0])

    def close(self) -> None:
        """End vLLM's processes."""
        self._llm.close()

    def _pull(self, weights: WeightReader, want: Version | None) -> Pulled:
        """Have all workers hold `want`, newer ones if those are gone, or the newest for None.

        Raises:
            StoreLost: it cannot be fetched any more; no worker has another version than it had.
        """
        self._num_pulls += 1
        compare = self._num_pulls <= COMPARED_PULLS
        source = weights if self._is_here else weights.handle
        while True:
            found = self._llm.call("rhymeflow_install", source, want, compare)
            lost = [each for each in found if isinstance(each, StoreLost)]
            if len(lost) == len(found):
                raise lost[0]
            if lost:  # what some have, all must get
                time.sleep(LOST_SECONDS)
                continue
            if all(each == found[0] for each in found):
                return Pulled(*found[0])
            want = max(each.version for each in found)

    def _give(self, entry: Entry) -> None:
        """Have vLLM queue a request, behind the urgent ones and in the order of submission."""
        stream, cache = noise.stream(self._seed, entry.request.noise_key), f"version {self.version}"
        self._llm.add(entry.request, entry.number, stream=stream, cache=cache)

    def _admit_urgent(self) -> None:
        """Give vLLM the urgent requests that have places; more only where nothing else waits."""
        waiting = set(self._llm.status().waiting)
        given = [entry for key, entry in self._entries.items() if key in self._llm]
        others = [entry for entry in given if not entry.request.is_urgent]
        running = [entry for entry in others if entry.request.id not in waiting]
        num_urgent = len(given) - len(others)
        while self._urgent:
            is_full = len(running) + num_urgent >= self._limits.max_num_seqs
            if num_urgent >= self._urgent_places and (is_full or len(running) < len(others)):
                return
            if is_full:
                last = max(running, key=lambda entry: entry.number)
                running.remove(last)
                self._llm.abort([last.request.id])
                self._give(last)
            self._give(self._urgent.popleft())
            num_urgent += 1

    def _propose(self) -> None:
        drafts: dict[Hashable, Draft] = {}
        if self._drafting.drafter is not None:
            status = self._llm.status()
            ready = [entry.request for key, entry in self._entries.items() if key in status.ready]
            rows, kv_tokens = status.unready_rows, status.kv_tokens
            drafts = self._drafting.propose(ready, other_rows=rows, kv_tokens=kv_tokens)
        self._llm.draft({key: draft.tokens for key, draft in drafts.items()})

    def _take(self, stepped: Stepped) -> list[Finished]:
        """Append what was generated to the requests."""
        finished = []
        for key, tokens in stepped.tokens.items():
            request = self._entries[key].request
            segment = Segment(len(request.tokens), self.version, self._instance)
            # The last one is drawn after all that stand.
            request.extend(tokens, stepped.logprobs[key], segment, len(tokens) - 1)
            request.steps += 1
            request.drafted += stepped.drafted.get(key, 0)
            reason = request.finish_reason()
            assert (reason is not None) == (key in stepped.finished), (key, reason)
            if reason is not None:
                finished.append(Finished(request, reason))
        count = sum(map(len, stepped.tokens.values()))
        self._num_generated += count
        self._clock += count / max(len(stepped.tokens), 1)
        return finished

    def _forget(self, ids: list[Hashable]) -> None:
        self._drafting.end(ids)
        for key in ids:
            del self._entries[key]


def timer(config: Config) -> Callable[[], float]:
    """What iterations are timed with, so that drafts are weighed against what they cost.

    With one thread and no other process that computes, the processor's time is what an iteration
    takes, whatever else the machine does; else the wall's.
    """
    rollout = config.rollout
    is_here = resolve_device(config.model).type == "cpu" and rollout.vllm_tensor_parallel_size == 1
    alone = is_here and os.environ.get("OMP_NUM_THREADS") == "1"
    return time.process_time if alone else time.perf_counter
