"""vLLM in a process of its own, by hand or behind our engine: run by the python that has vLLM.

Answers {prompts, lengths, temperature, noise_epoch, names} with {seconds, tokens, drafted,
accepted}; `ours` has what it answered as its history where it drafts, and takes {"weights": DIR}.
`Peer` has the protocol. `seconds` are the processor's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path[0] = str(Path(__file__).parents[2])  # this folder's names are not for import

from rhymeflow.workers.launch import missing_openmp  # noqa: E402 - from the root


def main() -> None:
    if library := missing_openmp(Path(sys.prefix), os.environ):
        os.environ["LD_PRELOAD"] = str(library)
        os.execv(sys.executable, sys.orig_argv)
    how = json.loads(sys.argv[1])
    side = Ours(how) if how["engine"] == "ours" else ByHand(how)
    print("answer:{}", flush=True)
    for line in sys.stdin:
        print("answer:" + json.dumps(side.answer(json.loads(line))), flush=True)


def configuration(how: dict[str, Any]) -> Any:
    from rhymeflow.config.load import read_config

    return read_config(
        "smollm2",
        {
            "model.dtype": how.get("dtype", "bfloat16"),
            "model.device": "cpu",
            "rollout.engine": "vllm",
            "rollout.max_num_seqs": str(how["max_num_seqs"]),
            "rollout.vllm_max_model_length": "1024",
            "rollout.vllm_kv_cache_gb": "1",
            "drafting.window": how.get("window", "off"),
            "rollout.vllm_head_dtype": how.get("head_dtype", "model"),
        },
    )


class Ours:
    """`VllmEngine`, under weights that are published here."""

    def __init__(self, how: dict[str, Any]) -> None:
        import torch

        from rhymeflow.histospec.drafter import drafter_of
        from rhymeflow.histospec.index import Index
        from rhymeflow.models.load import load_model
        from rhymeflow.weights.manifest import manifest_of
        from rhymeflow.weights.publish import make_store
        from rhymeflow.workers.rollout import make_engine, prepare

        config = configuration(how)
        prepare(config)
        dtype = getattr(torch, how.get("dtype", "bfloat16"))
        self._model = load_model(config.model, dtype=dtype, device=torch.device("cpu"))
        parameters = dict(self._model.named_parameters())
        self._folder = TemporaryDirectory()  # what the store is named after
        self._store = make_store(config, manifest_of(parameters), Path(self._folder.name))
        self._store.publish(0, parameters)
        self._reader = self._store.handle.open()
        engine: Any = make_engine(config, self._reader, "bench")
        self._engine = engine
        self._history: Index | None = None
        if config.drafting.window != "off":
            self._history = Index(max_tokens=200_000, max_responses=4000, shared=True)
            limits = engine.limits()
            stops = limits.stop_token_ids
            made = drafter_of(config, self._history.handle, limits.max_length, stops)
            engine.draft_with(made)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._pull(request["weights"]) if "weights" in request else self._generate(request)

    def _pull(self, folder: str) -> dict[str, Any]:
        from safetensors.torch import load_file

        self._model.load_state_dict(load_file(Path(folder) / "model.safetensors"), strict=False)
        self._model.tie_weights()
        version = self._engine.version + 1
        self._store.publish(version, dict(self._model.named_parameters()))
        start = time.process_time()
        self._engine.install(self._reader, version, keep_cache=False)
        return {"seconds": time.process_time() - start}

    def _generate(self, request: dict[str, Any]) -> dict[str, Any]:
        from benchmarks.rollouts.recorded import enter, requests_of

        requests = requests_of(request)
        start = time.process_time()
        for each in requests:
            self._engine.submit(each)
        while self._engine.has_work:
            self._engine.poll(0.0)
        seconds = time.process_time() - start
        for each in requests:
            if self._history is None:
                break
            _, noise_epoch, sample = each.noise_key
            keys = {"sample": sample, "noise_epoch": noise_epoch}
            enter(self._history, each.prompt_ids, each.tokens, 1.0, **keys)
        return {
            "seconds": seconds,
            "tokens": [each.tokens for each in requests],
            "logprobs": [each.logprobs for each in requests],
            "drafted": sum(each.drafted for each in requests),
            "accepted": sum(len(each.tokens) - each.steps for each in requests),
        }


class ByHand:
    """vLLM's `LLMEngine` and its own sampler; `speculative` is its speculative_config."""

    def __init__(self, how: dict[str, Any]) -> None:
        config = configuration(how)
        from rhymeflow.engine.vllm.arguments import engine_args, import_vllm

        import_vllm()
        from vllm import EngineArgs, LLMEngine

        arguments = engine_args(config)
        for name in ("worker_extension_cls", "speculative_config"):
            arguments.pop(name, None)
        arguments |= {"load_format": "auto", "enforce_eager": True}
        if "speculative" in how:
            arguments["speculative_config"] = how["speculative"]
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._number = 0

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._number += 1
        start = time.process_time()
        pairs = list(zip(request["prompts"], request["lengths"], strict=True))
        for i, (prompt, length) in enumerate(pairs):
            params = SamplingParams(
                temperature=request["temperature"],
                max_tokens=length,
                ignore_eos=True,
                detokenize=False,
                logprobs=0,
                output_kind=RequestOutputKind.DELTA,
            )
            salt = "one" if request.get("keep", True) else str(self._number)
            salted = {"prompt_token_ids": prompt, "cache_salt": salt}
            self._engine.add_request(f"{self._number}-{i}", salted, params)
        tokens: dict[str, list[int]] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                tokens.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
        seconds = time.process_time() - start
        found = [tokens[f"{self._number}-{i}"] for i in range(len(pairs))]
        return {"seconds": seconds, "tokens": found}


if __name__ == "__main__":
    main()
