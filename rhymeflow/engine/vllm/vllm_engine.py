"""vLLM's engine behind the seam of `engine/base.py`, stepped by hand.

vLLM's scheduler is in this process, and its worker too if there is one: between two iterations
nothing is under way. A request that was interrupted is submitted as a prompt with the tokens it
has; its noise counts from the end of its own prompt. Urgent requests have places as in
`native/scheduler.py`: of those that run, the one submitted last makes way, and runs again first.
What vLLM does not promise to keep is used in this package alone, and tried by `self_test.py`.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rhymeflow.config import Config
from rhymeflow.core.types import Version
from rhymeflow.engine.base import EngineLimits, Finished, Load, Request, Segment
from rhymeflow.engine.drafter import Drafting
from rhymeflow.engine.native import noise
from rhymeflow.engine.native.scheduler import URGENT_SHARE
from rhymeflow.engine.vllm import self_test
from rhymeflow.engine.vllm.arguments import engine_args, import_vllm, max_length
from rhymeflow.engine.vllm.sampler import arguments
from rhymeflow.errors import UserError
from rhymeflow.histospec.draft import NONE, IndexHandle
from rhymeflow.histospec.drafter import Drafter
from rhymeflow.models.load import configured_stop_token_ids
from rhymeflow.models.tokenizer import load_tokenizer
from rhymeflow.utils import objects
from rhymeflow.utils.objects import OwnerLost
from rhymeflow.weights.base import WeightReader
from rhymeflow.weights.proof import ProvedWeights

COMPARED_PULLS = 3
"""The first pulls, after which layers are compared with fresh ones."""

LOST_SECONDS = 0.1
"""Between attempts to bring all workers to one version, while the learner is gone."""


@dataclass(slots=True, eq=False)
class Entry:
    """A request inside the engine."""

    request: Request
    number: int
    """In the order of submission."""
    name: str = ""
    """The name under which vLLM is given it and returns its outputs; empty: it waits for a place of
    urgent requests."""
    known_as: str = ""
    """What vLLM's scheduler calls it."""


class VllmEngine:
    """A `base.RolloutEngine`. It begins with the newest weights of `weights`.

    `drafter_for` makes a drafter of an index and of the most tokens that a prompt and its response
    can have.

    Raises:
        UserError: vLLM does not take the configuration.
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
        rollout = config.rollout
        self._is_second = rollout.vllm_model_runner == "v2"
        self._llm = load_vllm(config)
        self._core = self._llm.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._remember_schedules()
        self._speculates = self._llm.vllm_config.speculative_config is not None
        if not self._is_second:
            self._call("rhymeflow_sample")
        elif self._speculates:
            self._call("rhymeflow_speculate")
        self.vocabulary = int(self._llm.model_config.get_vocab_size())
        self._entries: dict[Hashable, Entry] = {}
        self._given: dict[str, Entry] = {}
        """Those that vLLM has, by name."""
        self._urgent: deque[Entry] = deque()
        """Those that wait for a place of urgent requests."""
        self._num_submitted = self._num_given = 0
        self._num_generated, self._clock, self._prefill_seconds = 0, 0.0, 0.0
        self._drafting = Drafting(vocabulary=self.vocabulary, max_sequences=rollout.max_num_seqs)
        self._is_here = rollout.vllm_tensor_parallel_size == 1
        """The only worker is in this process; otherwise each worker opens a reader."""
        self._num_pulls = 0
        if not self._is_here and objects.are_shared():
            self._call("rhymeflow_join", objects.here().join)
        self._urgent_places = max(1, int(rollout.max_num_seqs * URGENT_SHARE))
        cache = self._llm.vllm_config.cache_config
        held = int(cache.num_gpu_blocks * cache.block_size)
        capacity = min(held, rollout.max_kv_tokens or held)
        stop = configured_stop_token_ids(config.model, load_tokenizer(config.model))
        self._limits = EngineLimits(rollout.max_num_seqs, max_length(config), capacity, stop)
        self._pulled = self._pull(weights, None)
        self_test.check(
            self, drafts=config.drafting.window != "off", has_sampler=not self._is_second
        )
        self._num_generated, self._clock, self._prefill_seconds = 0, 0.0, 0.0
        self._forget_cache()

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

    def limits(self) -> EngineLimits:
        """What it can hold."""
        return self._limits

    def load(self) -> Load:
        """How it is now."""
        return Load(
            len(self._scheduler.running),
            tuple(entry.request.id for entry in (*self._waiting(), *self._urgent)),
            self._kv_tokens,
            self._clock,
            self._num_generated,
            self._drafting.stats(),
            self._prefill_seconds,
        )

    def submit(self, request: Request) -> None:
        """Queue a request; see `base.RolloutEngine`."""
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
        started = time.perf_counter()
        outputs = self._llm.step()
        seconds = time.perf_counter() - started
        drafts: Mapping[str, list[int]] = self._scheduled.scheduled_spec_decode_tokens
        generated: dict[Hashable, list[int]] = {}
        drafted: dict[Hashable, int] = {}
        finished = []
        for output in outputs:
            (completion,) = output.outputs
            entry, tokens = self._given[output.request_id], list(completion.token_ids)
            if not tokens:
                continue
            request, pairs = entry.request, zip(completion.logprobs, tokens, strict=True)
            segment = Segment(len(request.tokens), self.version, self._instance)
            # The last one is drawn after all that stand.
            logprobs = [place[token].logprob for place, token in pairs]
            request.extend(tokens, logprobs, segment, len(tokens) - 1)
            generated[request.id] = tokens
            drafted[request.id] = len(drafts.get(entry.known_as, ()))
            request.steps += 1
            request.drafted += drafted[request.id]
            reason = request.finish_reason()
            assert (reason is not None) == output.finished, (request.id, reason)
            if reason is not None:
                finished.append(Finished(request, reason))
        count, rows = sum(map(len, generated.values())), self._scheduled.total_num_scheduled_tokens
        self._num_generated += count
        self._clock += count / max(len(generated), 1)
        decoded = len(generated) + sum(drafted.values())
        self._prefill_seconds += seconds * max(rows - decoded, 0) / max(rows, 1)
        self._drafting.observe(generated, drafted, rows=rows, seconds=seconds)
        self._forget([request.id for request, _ in finished])
        return finished

    def interrupt(self, ids: Iterable[Hashable] | None = None) -> list[Request]:
        """Stop requests; see `base.RolloutEngine`."""
        chosen = list(self._entries) if ids is None else ids
        found = [self._entries[key] for key in chosen if key in self._entries]
        self._llm.abort_request([entry.name for entry in found if entry.name])
        self._urgent = deque(entry for entry in self._urgent if entry not in found)
        self._forget([entry.request.id for entry in found])
        return [entry.request for entry in found]

    def prepare(self, weights: WeightReader, want: Version) -> bool:
        """Fetch what changed, if that can be put in; see `base.RolloutEngine`."""
        if self._is_here:
            return weights.prepare(self._pulled, want)
        found = self._call("rhymeflow_prepare", weights.handle, want)
        for each in found:
            if isinstance(each, OwnerLost):
                raise each
        return all(found)

    def install(self, weights: WeightReader, want: Version, *, keep_cache: bool) -> ProvedWeights:
        """Have every worker pull; see `base.RolloutEngine`."""
        self._pulled = self._pull(weights, want)
        if not keep_cache:
            self._forget_cache()
        return self._pulled

    def draft_from(self, index: IndexHandle) -> None:
        """Draft from this index; see `base.RolloutEngine`."""
        self.draft_with(self._drafter_for(index, self._limits.max_length))

    def draft_with(self, drafter: Drafter | None) -> None:
        """Draft from now on, also for running requests; None: no more."""
        self._drafting.use(drafter)

    def num_draws(self) -> int:
        """How often our sampler was called, by the first worker's count; V1 only."""
        return int(self._call("rhymeflow_samples")[0])

    def close(self) -> None:
        """End vLLM's processes, if it has any."""
        self._core.shutdown()

    def _call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `WorkerExtension` in every worker; return what each returned."""
        results: list[Any] = self._llm.collective_rpc(method, args=args)
        return results

    def _remember_schedules(self) -> None:
        """Keep what vLLM's scheduler decides in each iteration in `_scheduled`."""
        schedule = self._scheduler.schedule

        def remember(*args: Any, **kwargs: Any) -> Any:
            self._scheduled = schedule(*args, **kwargs)
            return self._scheduled

        self._scheduler.schedule = remember

    def _forget_cache(self) -> None:
        """Compute all keys and values anew, also of running requests."""
        self._llm.reset_prefix_cache(reset_running_requests=True)

    def _pull(self, weights: WeightReader, want: Version | None) -> ProvedWeights:
        """Have all workers hold `want`, newer ones if those are gone, or the newest for None.

        Raises:
            OwnerLost: it cannot be fetched any more; no worker has another version than it had.
        """
        self._num_pulls += 1
        compare = self._num_pulls <= COMPARED_PULLS
        source = weights if self._is_here else weights.handle
        while True:
            found = self._call("rhymeflow_install", source, want, compare)
            lost = [each for each in found if isinstance(each, OwnerLost)]
            if len(lost) == len(found):
                raise lost[0]
            if lost:  # what some have, all must get
                time.sleep(LOST_SECONDS)
                continue
            if all(each == found[0] for each in found):
                return ProvedWeights(*found[0])
            want = max(each.version for each in found)

    def _give(self, entry: Entry) -> None:
        """Have vLLM queue a request, behind the urgent ones and in the order of submission.

        Only requests of one version share prefixes, so with `keep_cache` none begins on keys and
        values of old weights.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        request, how = entry.request, entry.request.sampling
        stream = noise.stream(self._seed, request.noise_key)
        params = SamplingParams(
            temperature=0.0,  # our sampler draws
            max_tokens=how.max_new_tokens - len(request.tokens),
            stop_token_ids=sorted(how.stop_token_ids),
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.DELTA,
            extra_args=arguments(how, stream, len(request.prompt_ids)),
        )
        ids = [*request.prompt_ids, *request.tokens]
        prompt = {"prompt_token_ids": ids, "cache_salt": f"version {self.version}"}
        self._num_given += 1
        entry.name = f"r{self._num_given}"  # a new one, for it may have been here before
        self._given[entry.name] = entry
        entry.known_as = self._llm.add_request(
            entry.name,
            prompt,
            params,
            arrival_time=float(entry.number),
            priority=int(not request.is_urgent),
        )

    @property
    def _kv_tokens(self) -> int:
        return sum(each.num_computed_tokens for each in self._scheduler.running)

    def _waiting(self) -> list[Entry]:
        """Those that vLLM has and does not decode: no room yet, or preempted."""
        running = {each.request_id for each in self._scheduler.running}
        return [entry for entry in self._given.values() if entry.known_as not in running]

    def _admit_urgent(self) -> None:
        """Give vLLM the urgent requests that have places; more only where nothing else waits."""
        waiting = set(self._waiting())
        given = [entry for entry in self._entries.values() if entry.name]
        others = [entry for entry in given if not entry.request.is_urgent]
        running = [entry for entry in others if entry not in waiting]
        num_urgent = len(given) - len(others)
        while self._urgent:
            is_full = len(running) + num_urgent >= self._limits.max_num_seqs
            if num_urgent >= self._urgent_places and (is_full or len(running) < len(others)):
                return
            if is_full:
                last = max(running, key=lambda entry: entry.number)
                running.remove(last)
                self._llm.abort_request([last.name])
                del self._given[last.name]
                self._give(last)
            self._give(self._urgent.popleft())
            num_urgent += 1

    def _propose(self) -> None:
        """Have vLLM verify drafts of those that have nothing left to prefill, and of no others."""
        from vllm.v1.outputs import DraftTokenIds

        if not self._speculates:
            return
        given = {key: entry for key, entry in self._entries.items() if entry.name}
        running = {each.request_id for each in self._scheduler.running}
        ready, other_rows = [], 0
        for entry in given.values():
            there = self._scheduler.requests[entry.known_as]
            left = there.num_tokens - there.num_computed_tokens
            if left == 1 and entry.known_as in running:
                ready.append(entry.request)
            else:  # fewer where another has computed the same prompt
                other_rows += left
        other_rows = min(other_rows, self._scheduler.max_num_scheduled_tokens)
        drafts = self._drafting.propose(ready, other_rows=other_rows, kv_tokens=self._kv_tokens)
        tokens = {entry.known_as: [*drafts.get(key, NONE).tokens] for key, entry in given.items()}
        self._scheduler.update_draft_token_ids(DraftTokenIds(list(tokens), list(tokens.values())))
        if self._is_second and drafts:
            self._call("rhymeflow_draft", {name: each for name, each in tokens.items() if each})

    def _forget(self, ids: list[Hashable]) -> None:
        self._drafting.end(ids)
        for key in ids:
            self._given.pop(self._entries.pop(key).name, None)


def load_vllm(config: Config) -> Any:
    """vLLM's `LLMEngine`, with any weights.

    Raises:
        UserError: vLLM does not take the configuration.
    """
    is_second = config.rollout.vllm_model_runner == "v2"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if is_second else "0"
    import_vllm()
    from vllm import EngineArgs, LLMEngine

    try:
        return LLMEngine.from_engine_args(EngineArgs(**engine_args(config)))
    except (ValueError, NotImplementedError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"rollout.engine = 'vllm': vLLM refuses: {reason}") from error
