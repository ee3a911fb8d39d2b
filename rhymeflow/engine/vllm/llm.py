"""vLLM's engine, stepped by hand in this process.

With `VLLM_ENABLE_V1_MULTIPROCESSING=0` vLLM's scheduler is in this process, and its worker too if
there is one: `step` is one iteration, and between two of them nothing is under way. With tensor
parallelism the workers are processes of their own, and step together.
What vLLM does not promise to keep is used in this room alone, and tried by `self_test.py`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

from rhymeflow.config import Config
from rhymeflow.engine.base import Request
from rhymeflow.engine.vllm import speculator, worker
from rhymeflow.engine.vllm.sampler import arguments, noise_processor
from rhymeflow.errors import UserError
from rhymeflow.models.load import load_config, resolve_dtype
from rhymeflow.models.precision import resolve_device
from rhymeflow.models.source import readable

CPU_BLOCK = 32
"""Tokens of a block of the KV cache on CPUs: the kernels want multiples of it, and only whole
blocks of a prompt are shared, so the 128 that vLLM takes would share nothing of short prompts."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # Threads and cores are those that the run gives its workers.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
}
"""Variables that vLLM must find."""


class Stepped(NamedTuple):
    """What one iteration did, by request."""

    rows: int
    """Tokens that were run."""
    drafted: Mapping[Hashable, int]
    """Drafted tokens that were among them."""
    tokens: Mapping[Hashable, list[int]]
    logprobs: Mapping[Hashable, list[float]]
    finished: frozenset[Hashable]


class Status(NamedTuple):
    """How requests are, between two iterations."""

    ready: frozenset[Hashable]
    """Decoded in the next iteration, with nothing left to prefill."""
    waiting: list[Hashable]
    """Not decoded: no room yet, or preempted."""
    running: int
    kv_tokens: int
    unready_rows: int
    """Tokens that the others have to prefill, as many as an iteration may run; those whose prompt
    another has computed need fewer."""


class Llm:
    """vLLM with our sampler, and weights that mean nothing yet."""

    def __init__(self, config: Config) -> None:
        """Load it.

        Raises:
            UserError: vLLM does not take the configuration.
        """
        self._is_second = is_second = config.rollout.vllm_model_runner == "v2"
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if is_second else "0"
        import_vllm()
        from vllm import EngineArgs, LLMEngine

        self.max_length = max_length(config)
        try:
            self._engine = LLMEngine.from_engine_args(EngineArgs(**engine_args(config)))
        except (ValueError, NotImplementedError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"rollout.engine = 'vllm': vLLM refuses: {reason}") from error
        cache = self._engine.vllm_config.cache_config
        self.kv_capacity = int(cache.num_gpu_blocks * cache.block_size)
        self.vocabulary = int(self._engine.model_config.get_vocab_size())
        self._core = self._engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._last: Any = None
        self._schedule = self._scheduler.schedule
        self._scheduler.schedule = self._remember_schedule
        self._num_named = 0
        self._names: dict[Hashable, tuple[str, str]] = {}
        """By request, the name that it was given here and the one that vLLM made of it."""
        self._ids: dict[str, Hashable] = {}
        """By the name that was given."""
        self._speculates = self._engine.vllm_config.speculative_config is not None
        if not is_second:
            self.call("rhymeflow_sample")
        elif self._speculates:
            self.call("rhymeflow_speculate")

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `WorkerExtension` in every worker; return what each returned."""
        results: list[Any] = self._engine.collective_rpc(method, args=args)
        return results

    def __contains__(self, request: Hashable) -> bool:
        """Whether it has the request of this id."""
        return request in self._names

    def add(self, request: Request, number: int, *, stream: int, cache: str) -> None:
        """Queue a request; only those with the same `cache` share a prefix.

        Urgent ones are scheduled first, and the rest in the order of their numbers.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        how = request.sampling
        params = SamplingParams(
            temperature=0.0,  # what is sampled is up to our sampler
            max_tokens=how.max_new_tokens - len(request.tokens),
            stop_token_ids=sorted(how.stop_token_ids),
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.DELTA,
            extra_args=arguments(how, stream, len(request.prompt_ids)),
        )
        ids = [*request.prompt_ids, *request.tokens]
        prompt = {"prompt_token_ids": ids, "cache_salt": cache}
        self._num_named += 1
        name = f"r{self._num_named}"  # a new one, for it may have been here before
        known = self._engine.add_request(
            name, prompt, params, arrival_time=float(number), priority=int(not request.is_urgent)
        )
        self._names[request.id], self._ids[name] = (name, known), request.id

    def abort(self, requests: Iterable[Hashable]) -> None:
        """Forget those of these requests that it has."""
        names = [self._names.pop(key)[0] for key in requests if key in self._names]
        self._engine.abort_request(names)
        for name in names:
            del self._ids[name]

    def draft(self, drafts: Mapping[Hashable, list[int]]) -> None:
        """Have these verified in the next iteration, and nothing for others."""
        from vllm.v1.outputs import DraftTokenIds

        if self._speculates:
            known = {key: name for key, (_, name) in self._names.items()}
            tokens = [drafts.get(key, []) for key in known]
            self._scheduler.update_draft_token_ids(DraftTokenIds(list(known.values()), tokens))
            if self._is_second and drafts:
                self.call("rhymeflow_draft", {known[key]: each for key, each in drafts.items()})

    def step(self) -> Stepped:
        """Run one iteration."""
        self._last = None
        tokens, logprobs, finished = {}, {}, set()
        for output in self._engine.step():
            (completion,) = output.outputs
            key, new = self._ids[output.request_id], list(completion.token_ids)
            if output.finished:
                finished.add(key)
            if new:
                tokens[key] = new
                logprobs[key] = [
                    place[token].logprob
                    for place, token in zip(completion.logprobs, new, strict=True)
                ]
        scheduled = self._last
        rows, drafted = 0, {}
        if scheduled is not None:
            rows = scheduled.total_num_scheduled_tokens
            drafts = scheduled.scheduled_spec_decode_tokens
            drafted = {key: len(drafts.get(self._names[key][1], ())) for key in tokens}
        for key in finished:
            name, _ = self._names.pop(key)
            del self._ids[name]
        return Stepped(rows, drafted, tokens, logprobs, frozenset(finished))

    def status(self) -> Status:
        """How requests are."""
        scheduler = self._scheduler
        running = {request.request_id for request in scheduler.running}
        ready, kv_tokens, unready_rows = set(), 0, 0
        for key, (_, known) in self._names.items():
            request = scheduler.requests[known]
            left = request.num_tokens - request.num_computed_tokens
            if known in running:
                kv_tokens += request.num_computed_tokens
                if left == 1:
                    ready.add(key)
                    continue
            unready_rows += left
        unready_rows = min(unready_rows, scheduler.max_num_scheduled_tokens)
        waiting = [key for key, (_, known) in self._names.items() if known not in running]
        return Status(frozenset(ready), waiting, len(running), kv_tokens, unready_rows)

    def forget_cache(self) -> None:
        """Compute all keys and values anew, also of what runs."""
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def close(self) -> None:
        """End its processes, if it has any."""
        self._core.shutdown()

    def _remember_schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._last = self._schedule(*args, **kwargs)
        return self._last


def import_vllm() -> None:
    """Import vLLM with the variables that it must find: seconds, the first time."""
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    dispatcher: Any = importlib.import_module("vllm.triton_utils.dispatcher")
    dispatcher.vars = _vars


def _vars(value: object) -> Mapping[str, Any]:
    # vLLM looks at every global of every module for kernels to replace. llvmlite, which numba
    # loads, has one that answers to any name, `__dict__` included, with a function.
    found: Any = vars(value)
    return found if isinstance(found, Mapping) else {}


def max_length(config: Config) -> int:
    """Most tokens that a prompt and its response can have together."""
    text = load_config(config.model).get_text_config()
    own: int = text.max_position_embeddings
    return min(config.rollout.vllm_max_model_length or own, own)


def engine_args(config: Config) -> dict[str, Any]:
    """vLLM's arguments."""
    rollout, drafting = config.rollout, config.drafting
    device = resolve_device(config.model)
    drafts, is_second = drafting.window != "off", rollout.vllm_model_runner == "v2"
    rows = 1 + drafting.max_draft if drafts else 1
    arguments: dict[str, Any] = {
        "model": readable(config.model).location,
        "dtype": str(resolve_dtype(config.model, device)).removeprefix("torch."),
        "skip_tokenizer_init": True,
        "load_format": "dummy",  # the learner's are pulled
        "generation_config": "vllm",
        "max_model_len": max_length(config),
        "max_num_seqs": rollout.max_num_seqs,
        # vLLM counts tokens that are decoded too.
        "max_num_batched_tokens": rollout.max_prefill_tokens + rollout.max_num_seqs * rows,
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "scheduling_policy": "priority",
        "tensor_parallel_size": rollout.vllm_tensor_parallel_size,
        "worker_extension_cls": worker.PATH,
        "disable_log_stats": True,
    }
    if drafts:
        method = speculator.SPECULATOR if is_second else speculator.PROPOSER
        arguments["speculative_config"] = method | {"num_speculative_tokens": drafting.max_draft}
    if is_second:
        arguments["logits_processors"] = [noise_processor()]
        arguments["logprobs_mode"] = "processed_logits"
    if rollout.vllm_head_dtype == "float32":
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    if device.type == "cpu":
        # Compiled code would hold on to what was packed when it was traced.
        arguments |= {
            "enforce_eager": True,
            "block_size": CPU_BLOCK,
            "kv_cache_memory_bytes": int(rollout.vllm_kv_cache_gb * 1e9),
        }
    else:
        arguments["gpu_memory_utilization"] = rollout.vllm_gpu_memory_utilization
        arguments["moe_backend"] = "triton"  # it takes experts' weights as they are published
    return arguments
