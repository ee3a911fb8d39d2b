"""vLLM as a `RolloutEngine`: each poll runs one of vLLM's iterations.

vLLM's scheduler is in this process, and so is its worker if there is only one. An interrupted
request is submitted again with its tokens added to the prompt; its noise counts from the end of the
original prompt. Urgent requests are admitted as in `native/scheduler.py`: of the others that run,
the last submitted makes way, and resumes first. `self_test.py` tests vLLM's internals used here."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from rhymeflow.config import Config
from rhymeflow.core.types import Version
from rhymeflow.engine.base import EngineLimits, Finished, Load, Request, Segment
from rhymeflow.engine.drafter import Drafting
from rhymeflow.engine.native import noise
from rhymeflow.engine.native.scheduler import URGENT_SHARE
from rhymeflow.engine.vllm import self_test
from rhymeflow.engine.vllm.adapter import lora_request
from rhymeflow.engine.vllm.arguments import engine_args, import_vllm, max_length, model_runner
from rhymeflow.engine.vllm.sampler import UNKNOWN_LOGPROB, arguments
from rhymeflow.engine.vllm.supported import check_supported, known_models
from rhymeflow.errors import UserError
from rhymeflow.histospec.draft import NONE, IndexHandle
from rhymeflow.histospec.drafter import Drafter
from rhymeflow.models.adapter_files import adapter_for
from rhymeflow.models.load import configured_stop_token_ids
from rhymeflow.models.tokenizer import load_tokenizer
from rhymeflow.utils import objects
from rhymeflow.utils.objects import OwnerLost
from rhymeflow.weights.base import WeightReader, prove
from rhymeflow.weights.manifest import ManifestMismatch
from rhymeflow.weights.proof import ProvedWeights

COMPARED_PULLS = 3  # number of first pulls after which layers are compared with fresh ones

MOST_WITHOUT_ROOM = 3
"""Draws of a request without room (`noise.draw`, once in 5e13) that end the instance: a defect."""

LOST_SECONDS = 0.1
"""Seconds between attempts to bring all workers to one version while some have lost the learner."""


@dataclass(slots=True, eq=False)
class Entry:
    """A request inside the engine."""

    request: Request
    number: int  # order of submission, from 1
    name: str = ""
    """Its id in `LLMEngine`'s calls and outputs; empty while it waits as an urgent request."""
    scheduler_id: str = ""  # its id in vLLM's scheduler
    draws_without_room: int = 0


class VllmEngine:
    """A `base.RolloutEngine` that starts with the newest weights of `weights`. `drafter_for(index,
    max_length, stop_token_ids)` makes a drafter; `max_length` counts a prompt's and its response's
    tokens. Raises `UserError` if vLLM does not take the configuration."""

    def __init__(
        self,
        config: Config,
        weights: WeightReader,
        *,
        instance: str,
        drafter_for: Callable[[IndexHandle, int, frozenset[int]], Drafter],
    ) -> None:
        self._seed, self._instance, self._drafter_for = config.run.seed, instance, drafter_for
        rollout = config.rollout
        adapter = adapter_for(config.model)
        self._lora_request = None if adapter is None else lora_request()
        self._is_v2 = model_runner(config) == "v2"
        self._llm = load_vllm(config)
        self._core = self._llm.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._remember_schedules()
        self._speculates = self._llm.vllm_config.speculative_config is not None
        if not self._is_v2:
            self._call("rhymeflow_sample")
        elif self._speculates:
            self._call("rhymeflow_speculate")
        self.vocabulary = int(self._llm.model_config.get_vocab_size())
        self._entries: dict[Hashable, Entry] = {}
        self._in_vllm: dict[str, Entry] = {}  # entries that vLLM has, by name
        self._urgent: deque[Entry] = deque()  # urgent entries that vLLM does not have yet
        self._num_submitted = self._num_added = 0
        self._num_generated, self._clock, self._prefill_seconds = 0, 0.0, 0.0
        self._drafting = Drafting(vocabulary=self.vocabulary, max_sequences=rollout.max_num_seqs)
        self._is_local = rollout.vllm_tensor_parallel_size == 1
        """Whether the only worker is in this process; otherwise each worker opens a reader."""
        self._num_pulls = 0
        if not self._is_local and objects.are_shared():
            self._call("rhymeflow_join", objects.here().join)
        self._urgent_places = max(1, int(rollout.max_num_seqs * URGENT_SHARE))
        cache = self._llm.vllm_config.cache_config
        cache_tokens = int(cache.num_gpu_blocks * cache.block_size)
        capacity = min(cache_tokens, rollout.max_kv_tokens or cache_tokens)
        stop_ids = configured_stop_token_ids(config.model, load_tokenizer(config.model))
        self._limits = EngineLimits(rollout.max_num_seqs, max_length(config), capacity, stop_ids)
        try:
            if adapter is not None:
                base = self._call("rhymeflow_adapt", config)
                prove(base[0].manifest, [each.pulled for each in base])
            self._pulled = self._pull(weights, None)
        except ManifestMismatch as error:
            raise UserError(
                f"rollout.engine = 'vllm': the weights of model.name = {config.model.name!r} have "
                f"no place in vLLM's model: {error}"
            ) from error
        if adapter is not None:
            self._prove_adapter()
        self_test.check(self, drafts=config.drafting.window != "off", has_sampler=not self._is_v2)
        self._num_generated, self._clock, self._prefill_seconds = 0, 0.0, 0.0
        self._forget_cache()

    @property
    def version(self) -> Version:
        """See `base.RolloutEngine`."""
        return self._pulled.version

    @property
    def checksum(self) -> int:
        """See `base.RolloutEngine`."""
        return self._pulled.checksum

    @property
    def has_work(self) -> bool:
        """See `base.RolloutEngine`."""
        return bool(self._entries)

    def limits(self) -> EngineLimits:
        """See `base.RolloutEngine`."""
        return self._limits

    def load(self) -> Load:
        """See `base.RolloutEngine`."""
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
        num_prompt, max_new = len(request.prompt_ids), request.sampling.max_new_tokens
        if not num_prompt:
            raise UserError(f"request {request.id}: the prompt is empty")
        if num_prompt + max_new > self._limits.max_length:
            raise UserError(
                f"request {request.id}: {num_prompt} prompt tokens and up to {max_new} new ones "
                f"are more than the {self._limits.max_length} that vLLM takes (the model's "
                "max_position_embeddings, or rollout.vllm_max_model_length)"
            )
        self._num_submitted += 1
        entry = self._entries[request.id] = Entry(request, self._num_submitted)
        if request.is_urgent:
            self._urgent.append(entry)
        else:
            self._add_to_vllm(entry)

    def poll(self, timeout: float) -> list[Finished]:
        """Run one iteration if any request runs or waits; `timeout` has no effect."""
        if not self._entries:
            return []
        if self._urgent:
            self._admit_urgent()
        self._propose()
        started = time.perf_counter()
        outputs = self._llm.step()
        seconds = time.perf_counter() - started
        # By id in vLLM's scheduler: it may have cut or left out what was proposed.
        verified: Mapping[str, list[int]] = self._scheduled.scheduled_spec_decode_tokens
        generated: dict[Hashable, list[int]] = {}
        drafted: dict[Hashable, int] = {}
        finished = []
        for output in outputs:
            (completion,) = output.outputs
            entry = self._in_vllm[output.request_id]
            request = entry.request
            if not completion.token_ids:
                continue
            drafted[request.id] = len(verified.get(entry.scheduler_id, ()))
            request.drafted += drafted[request.id]
            generated[request.id] = self._extended(entry, completion)
            reason = request.finish_reason()
            if reason is None and len(generated[request.id]) < len(completion.token_ids):
                self._add_again(entry)
                continue
            request.steps += 1
            assert reason is not None or not output.finished, request.id
            if reason is not None:
                if not output.finished:  # by its text, which vLLM does not know
                    self._llm.abort_request([entry.name])
                finished.append(Finished(request, reason))
        count, rows = sum(map(len, generated.values())), self._scheduled.total_num_scheduled_tokens
        self._num_generated += count
        self._clock += count / max(len(generated), 1)
        decoded = len(generated) + sum(drafted.values())
        self._prefill_seconds += seconds * max(rows - decoded, 0) / max(rows, 1)
        self._drafting.observe(generated, drafted, rows=rows, seconds=seconds)
        self._forget([request.id for request, _ in finished])
        return finished

    def _extended(self, entry: Entry, completion: Any) -> list[int]:
        """Append a request's new tokens; return them. The first whose draw had no room is left out,
        and what vLLM made of it, and so is what follows the end of a turn."""
        request, tokens = entry.request, completion.token_ids
        pairs = zip(completion.logprobs, tokens, strict=True)
        logprobs = [by_token[token].logprob for by_token, token in pairs]
        known = list(takewhile(lambda logprob: logprob < UNKNOWN_LOGPROB, logprobs))
        if len(known) < len(tokens):
            entry.draws_without_room += 1
            error = f"request {request.id}: {MOST_WITHOUT_ROOM} draws had no room"
            assert entry.draws_without_room < MOST_WITHOUT_ROOM, error
        del known[request.kept(tokens[: len(known)]) :]
        if known:
            segment = Segment(len(request.tokens), self.version, self._instance)
            # All tokens but vLLM's last were drafted.
            num_accepted = min(len(known), len(tokens) - 1)
            request.extend(tokens[: len(known)], known, segment, num_accepted)
        return list(tokens[: len(known)])

    def interrupt(self, ids: Iterable[Hashable] | None = None) -> list[Request]:
        """Stop requests; see `base.RolloutEngine`."""
        chosen = list(self._entries) if ids is None else ids
        entries = [self._entries[key] for key in chosen if key in self._entries]
        self._llm.abort_request([entry.name for entry in entries if entry.name])
        self._urgent = deque(entry for entry in self._urgent if entry not in entries)
        self._forget([entry.request.id for entry in entries])
        return [entry.request for entry in entries]

    def prepare(self, weights: WeightReader, want: Version) -> bool:
        """Fetch what changed; see `base.RolloutEngine`."""
        if self._is_local:
            return weights.prepare(self._pulled, want)
        results = self._call("rhymeflow_prepare", weights.handle, want)
        for each in results:
            if isinstance(each, OwnerLost):
                raise each
        return all(results)

    def install(self, weights: WeightReader, want: Version, *, keep_cache: bool) -> ProvedWeights:
        """Have every worker pull; see `base.RolloutEngine`."""
        self._pulled = self._pull(weights, want)
        if not keep_cache:
            self._forget_cache()
        return self._pulled

    def draft_from(self, index: IndexHandle) -> None:
        """Draft from this index; see `base.RolloutEngine`."""
        limits = self._limits
        self.draft_with(self._drafter_for(index, limits.max_length, limits.stop_token_ids))

    def draft_with(self, drafter: Drafter | None) -> None:
        """Use this drafter from now on, also for running requests; None stops drafting."""
        self._drafting.use(drafter)

    def num_draws(self) -> int:
        """Return how often the first worker called our sampler; V1 only."""
        return int(self._call("rhymeflow_samples")[0])

    def close(self) -> None:
        """End vLLM's processes, if it has any."""
        self._core.shutdown()

    def _call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `WorkerExtension` in every worker; return what each returned."""
        return self._llm.collective_rpc(method, args=args)

    def _remember_schedules(self) -> None:
        """Store the output of each call of vLLM's scheduler in `_scheduled`."""
        schedule = self._scheduler.schedule

        def remember(*args: Any, **kwargs: Any) -> Any:
            self._scheduled = schedule(*args, **kwargs)
            return self._scheduled

        self._scheduler.schedule = remember

    def _prove_adapter(self) -> None:
        """Raise `UserError` unless vLLM computes the model with an adapter (law 7)."""
        self._call("rhymeflow_draw_adapter")
        response = self_test.response(self, number=0)
        ids = [*response.prompt_ids, *response.tokens]
        self._call("rhymeflow_prove_adapter", ids, len(response.prompt_ids), response.logprobs)
        self._forget_cache()

    def sleep(self) -> None:
        """Leave the GPU's memory to others, without work: weights go to main memory."""
        assert not self.has_work
        self._llm.sleep(level=1)

    def wake(self) -> None:
        """Take the memory back, with an empty cache."""
        self._llm.wake_up()

    def _forget_cache(self) -> None:
        """Have vLLM recompute all keys and values, also those of running requests."""
        self._llm.reset_prefix_cache(reset_running_requests=True)

    def _pull(self, weights: WeightReader, want: Version | None) -> ProvedWeights:
        """Bring all workers to `want`, newer weights if those are gone, or the newest for None.
        Raises `OwnerLost` if the weights are gone with the learner; every worker has its old
        version."""
        self._num_pulls += 1
        compare = self._num_pulls <= COMPARED_PULLS
        source = weights if self._is_local else weights.handle
        while True:
            results = self._call("rhymeflow_install", source, want, compare)
            lost = [each for each in results if isinstance(each, OwnerLost)]
            if len(lost) == len(results):
                raise lost[0]
            if lost:  # other workers have the version already, so all must get it
                time.sleep(LOST_SECONDS)
                continue
            if all(each.weights == results[0].weights for each in results):
                return prove(weights.manifest, results)
            want = max(each.weights.version for each in results)

    def _add_to_vllm(self, entry: Entry) -> None:
        """Have vLLM queue a request, behind the urgent ones and in the order of submission. Only
        requests added under the same version share prefixes, so after an `install` with
        `keep_cache` no later request starts from keys and values of old weights."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        request, sampling = entry.request, entry.request.sampling
        stream = noise.stream(self._seed, request.noise_key)
        params = SamplingParams(
            temperature=0.0,  # our sampler draws
            max_tokens=sampling.max_new_tokens - len(request.tokens),
            stop_token_ids=sorted(sampling.stop_token_ids),
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.DELTA,
            extra_args=arguments(sampling, stream, len(request.prompt_ids)),
        )
        ids = [*request.prompt_ids, *request.tokens]
        prompt = {"prompt_token_ids": ids, "cache_salt": f"version {self.version}"}
        self._num_added += 1
        entry.name = f"r{self._num_added}"  # a new name: vLLM may have had the request before
        self._in_vllm[entry.name] = entry
        entry.scheduler_id = self._llm.add_request(
            entry.name,
            prompt,
            params,
            arrival_time=float(entry.number),
            lora_request=self._lora_request,
            priority=int(not request.is_urgent),
        )

    def _add_again(self, entry: Entry) -> None:
        """Have vLLM queue a request that it has, with its tokens so far."""
        self._llm.abort_request([entry.name])
        del self._in_vllm[entry.name]
        self._add_to_vllm(entry)

    @property
    def _kv_tokens(self) -> int:
        return sum(each.num_computed_tokens for each in self._scheduler.running)

    def _waiting(self) -> list[Entry]:
        """Return entries in vLLM's queue: those without room yet, and preempted ones."""
        running = {each.request_id for each in self._scheduler.running}
        return [entry for entry in self._in_vllm.values() if entry.scheduler_id not in running]

    def _admit_urgent(self) -> None:
        """Add urgent requests to vLLM, up to `_urgent_places` while other requests wait."""
        waiting = set(self._waiting())
        in_vllm = [entry for entry in self._entries.values() if entry.name]
        others = [entry for entry in in_vllm if not entry.request.is_urgent]
        running = [entry for entry in others if entry not in waiting]
        num_urgent = len(in_vllm) - len(others)
        while self._urgent:
            is_full = len(running) + num_urgent >= self._limits.max_num_seqs
            if num_urgent >= self._urgent_places and (is_full or len(running) < len(others)):
                return
            if is_full:
                last = max(running, key=lambda entry: entry.number)
                running.remove(last)
                self._add_again(last)
            self._add_to_vllm(self._urgent.popleft())
            num_urgent += 1

    def _propose(self) -> None:
        """Give vLLM drafts for the running requests that have nothing left to prefill."""
        from vllm.v1.outputs import DraftTokenIds

        if not self._speculates:
            return
        in_vllm = {key: entry for key, entry in self._entries.items() if entry.name}
        running = {each.request_id for each in self._scheduler.running}
        ready, other_rows = [], 0
        for entry in in_vllm.values():
            vllm_request = self._scheduler.requests[entry.scheduler_id]
            left = vllm_request.num_tokens - vllm_request.num_computed_tokens
            if left == 1 and entry.scheduler_id in running:
                ready.append(entry.request)
            else:  # an upper bound: vLLM computes no shared prefix again
                other_rows += left
        other_rows = min(other_rows, self._scheduler.max_num_scheduled_tokens)
        drafts = self._drafting.propose(ready, other_rows=other_rows, kv_tokens=self._kv_tokens)
        tokens = {
            entry.scheduler_id: [*drafts.get(key, NONE).tokens] for key, entry in in_vllm.items()
        }
        self._scheduler.update_draft_token_ids(DraftTokenIds(list(tokens), list(tokens.values())))
        if self._is_v2 and drafts:
            self._call("rhymeflow_draft", {name: each for name, each in tokens.items() if each})

    def _forget(self, ids: list[Hashable]) -> None:
        self._drafting.end(ids)
        for key in ids:
            self._in_vllm.pop(self._entries.pop(key).name, None)


def load_vllm(config: Config) -> Any:
    """Create vLLM's `LLMEngine`, with dummy weights, which the first pull replaces. Raises
    `UserError` if vLLM does not take the configuration."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(model_runner(config) == "v2"))
    import_vllm()
    check_supported(config, known_models())
    from vllm import EngineArgs, LLMEngine

    try:
        return LLMEngine.from_engine_args(EngineArgs(**engine_args(config)))
    except (ValueError, NotImplementedError) as error:
        # An unknown model's message lists all that are known.
        reason = " ".join(str(error).split()).partition(" Supported architectures:")[0]
        raise UserError(f"rollout.engine = 'vllm': vLLM refuses: {reason}") from error
