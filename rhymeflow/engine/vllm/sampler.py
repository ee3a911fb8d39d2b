"""Counter-based noise in vLLM (law 3): a sampler for model runner V1, a logits processor for V2.

vLLM's own draws depend on earlier draws and on drafts; here tokens are drawn as in the native
engine, and drafted tokens are accepted while they equal the drawn ones. In V2 the logits processor
draws, leaving one finite logit in each row, the drawn token's log-probability; vLLM samples from it
at temperature 0, so its greedy verification is exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rhymeflow.engine.base import Sampling
from rhymeflow.engine.native import noise
from rhymeflow.engine.native.sampler import Draws, Shaping, drawn, sample
from rhymeflow.engine.vllm.speculator import on_device

EXTRA = "rhymeflow"  # the key in a request's `extra_args` under which `arguments` puts our values

PLACEHOLDER = -1  # the token id that vLLM skips


def arguments(sampling: Sampling, stream: int, num_prompt: int) -> dict[str, Any]:
    """Return `extra_args` for a request whose response begins after `num_prompt` tokens."""
    shaping = sampling.temperature, sampling.top_k, sampling.top_p
    return {EXTRA: [str(stream), num_prompt, *shaping]}


def draws_of(extra_args: dict[str, Any], num_tokens: int, num_rows: int) -> Draws:
    """Return the draws for the next rows of a request with `num_tokens`, prompt included."""
    stream, num_prompt, temperature, top_k, top_p = extra_args[EXTRA]
    first = num_tokens - num_prompt
    # A prompt that is still being prefilled also has a row, whose token vLLM discards.
    positions = [max(first + i, 0) for i in range(num_rows)]
    sampling = Sampling(temperature, top_p, top_k, 0, frozenset())
    return Draws(sampling, int(stream), positions)


def verify(
    logits_RV: Tensor, draws: list[Draws], drafts: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Draw a token in every row; keep each request's tokens up to the first that was not drafted.

    A request has one row more than drafted tokens: its i-th row's logits follow i of them. Returns
    tokens, int32 [n, W], with `PLACEHOLDER` after the last one kept, and their log-probabilities,
    float32 [n, W]."""
    tokens, logprobs = sample(logits_RV, draws)
    width = 1 + max(map(len, drafts))
    kept_tokens, kept_logprobs, first = [], [], 0
    for draft in drafts:
        num_kept = 1
        while num_kept <= len(draft) and draft[num_kept - 1] == tokens[first + num_kept - 1]:
            num_kept += 1
        rest = width - num_kept
        kept_tokens.append(tokens[first : first + num_kept] + [PLACEHOLDER] * rest)
        kept_logprobs.append(logprobs[first : first + num_kept] + [0.0] * rest)
        first += len(draft) + 1
    return torch.tensor(kept_tokens, dtype=torch.int32), torch.tensor(kept_logprobs)


class CounterSampler(nn.Module):
    """`sampler` and `rejection_sampler` of a model runner (V1). It reads
    `requests[id].sampling_params.extra_args`, `input_batch.req_ids` and
    `input_batch.num_tokens_no_spec` of the runner."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._runner = [runner]  # in a list, so that torch does not register it as a submodule
        self.num_calls = 0  # read by the self-test, to see that vLLM uses this sampler

    def forward(self, *args: Any, logits: Tensor | None = None, **_: Any) -> Any:
        """Draw; vLLM calls its sampler by keywords, its rejection sampler by position."""
        self.num_calls += 1
        if not args:
            assert logits is not None
            return self._draw(logits, [()] * len(logits))
        metadata, _draft_probs, target_logits, _sampling = args
        flat = metadata.draft_token_ids.tolist()
        drafts, first = [], 0
        for count in metadata.num_draft_tokens:
            drafts.append(flat[first : first + count])
            first += count
        return self._draw(target_logits, drafts)

    def _draw(self, logits_RV: Tensor, drafts: Sequence[Sequence[int]]) -> Any:
        runner = self._runner[0]
        batch = runner.input_batch
        draws = [
            draws_of(
                runner.requests[batch.req_ids[i]].sampling_params.extra_args,
                int(batch.num_tokens_no_spec[i]),
                len(draft) + 1,
            )
            for i, draft in enumerate(drafts)
        ]
        return output(*verify(logits_RV, draws, drafts), logits_RV.device)


def output(tokens_NW: Tensor, logprobs_NW: Tensor, device: torch.device) -> Any:
    """Return drawn tokens as vLLM's sampler output."""
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput

    tokens_NW = tokens_NW.to(device)
    flat = tokens_NW.clamp(min=0).flatten()[:, None]
    ranks = torch.zeros(len(flat), dtype=torch.int32, device=device)
    logprobs = logprobs_NW.to(device).flatten()[:, None]
    return SamplerOutput(
        sampled_token_ids=tokens_NW, logprobs_tensors=LogprobsTensors(flat, logprobs, ranks)
    )


# -- Model runner V2 -------------------------------------------------------------------------------

_UNUSED = arguments(Sampling(0.0, 1.0, 0, 0, frozenset()), 0, 0)
"""Arguments of requests that are not ours: vLLM warms up with some."""

UNKNOWN_LOGPROB = 1.0
"""Stands for a token that would need a wait (`noise.UNKNOWN`); no log-probability is as large."""


class NoiseSlots:
    """Draws each row's token by its request's slot, where a `LogitsProcessor` of vLLM is called.
    Suffix S: slots."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self._host_S3 = np.zeros((req_states.max_num_reqs, 3), np.int64)
        self._shapings: list[Shaping] = []
        self._device: torch.device = req_states.device
        self._changed = True

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Remember how the request in a slot is sampled."""
        extra_args = sampling_params.extra_args or _UNUSED
        stream, num_prompt, temperature, top_k, top_p = extra_args[EXTRA]
        shaping = temperature, top_k, top_p
        if shaping not in self._shapings:
            self._shapings.append(shaping)
        signed = np.uint64(int(stream)).astype(np.int64)
        self._host_S3[req_idx] = signed, num_prompt, self._shapings.index(shaping)
        self._changed = True
        return True

    def apply_staged_writes(self) -> None:
        """Send what was remembered to the device."""
        if self._changed:
            self._on_device_S3 = on_device(torch.from_numpy(self._host_S3.copy()), self._device)
            self._changed = False

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        """Draw a token in every row. Return the logits, vLLM's float32 copy, changed: the token's
        log-probability, or `UNKNOWN_LOGPROB` at any token, and -inf elsewhere."""
        slot_R3 = self._on_device_S3[ctx.expanded_idx_mapping.long()]
        stream_R, num_prompt_R, index_R = slot_R3.unbind(1)
        # A prompt that is still being prefilled also has a row, whose token vLLM discards.
        keys_R = noise.words(stream_R, (ctx.pos + 1 - num_prompt_R).clamp(min=0))
        token_R, logprob_R = torch.zeros_like(keys_R), logits.new_zeros(len(keys_R))
        waits = logits.device.type == "cpu"
        for index in np.unique(self._host_S3[ctx.idx_mapping_np, 2]).tolist():
            found = drawn(logits, keys_R, self._shapings[index], waits)
            token_R = torch.where(index_R == index, found[0], token_R)
            logprob_R = torch.where(index_R == index, found[1], logprob_R)
        logprob_R = logprob_R.masked_fill(token_R == noise.UNKNOWN, UNKNOWN_LOGPROB)
        token_R = token_R.clamp(min=0)
        return logits.fill_(-torch.inf).scatter_(1, token_R[:, None], logprob_R[:, None])


def noise_processor() -> type:
    """Return the class for vLLM's `logits_processors`."""
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor

    return type("NoiseProcessor", (NoiseSlots, LogitsProcessor), {})
