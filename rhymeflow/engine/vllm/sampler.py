"""The sampler that takes the place of vLLM's sampler and of its rejection sampler (law 3).

vLLM draws with a generator whose state depends on what was drawn before, and verifies drafts by
comparing probabilities with random numbers, so drafts change its tokens. Here each row is drawn by
the native engine's sampler, with noise by counter: a token is a function of its logits, the
response's noise stream and its position. A draft stands while it equals what was drawn, as in
`engine/native/verify.py`, so tokens are those that decoding one by one would have given.

Holds true: log-probabilities are of the distribution that was sampled (temperature, top-k, top-p),
as the learner computes them. The functions know no vLLM; `CounterSampler` says what of vLLM's model
runner (V1) it reads: `requests[id].sampling_params.extra_args`, `input_batch.req_ids` and
`input_batch.num_tokens_no_spec`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rhymeflow.engine.base import Sampling
from rhymeflow.engine.native.sampler import Draws, sample

EXTRA = "rhymeflow"
"""Where in a request's `extra_args` its noise and its distribution are: `arguments`."""

PLACEHOLDER = -1
"""What vLLM skips in a row of tokens."""


class Drawn(NamedTuple):
    """What was drawn in one iteration, for n requests with at most W tokens each."""

    tokens_NW: Tensor
    """int32; `PLACEHOLDER` after the last token that stands."""
    logprobs_NW: Tensor
    """float32; of the tokens that stand."""


def arguments(how: Sampling, stream: int, num_prompt: int) -> dict[str, Any]:
    """`extra_args` of a request whose response begins after `num_prompt` tokens."""
    return {EXTRA: [str(stream), num_prompt, how.temperature, how.top_k, how.top_p]}


def draws_of(extra_args: dict[str, Any], num_tokens: int, num_rows: int) -> Draws:
    """What to draw for a request that has `num_tokens`, prompt included, in its next rows."""
    stream, num_prompt, temperature, top_k, top_p = extra_args[EXTRA]
    first = num_tokens - num_prompt
    # A prompt that is still being prefilled has a row too, whose token vLLM throws away.
    positions = [max(first + i, 0) for i in range(num_rows)]
    return Draws(_sampling(temperature, top_k, top_p), int(stream), positions)


def verify(logits_RV: Tensor, draws: list[Draws], drafts: Sequence[Sequence[int]]) -> Drawn:
    """Draw a token in every row; keep each request's drawn tokens up to its first wrong draft.

    A request has one row more than drafted tokens: the i-th row's logits are those after i of them.
    """
    tokens, logprobs = sample(logits_RV.float(), draws)
    width = 1 + max(map(len, drafts))
    stand, likely, first = [], [], 0
    for draft in drafts:
        count = 1
        while count <= len(draft) and draft[count - 1] == tokens[first + count - 1]:
            count += 1
        rest = width - count
        stand.append(tokens[first : first + count] + [PLACEHOLDER] * rest)
        likely.append(logprobs[first : first + count] + [0.0] * rest)
        first += len(draft) + 1
    return Drawn(torch.tensor(stand, dtype=torch.int32), torch.tensor(likely))


class CounterSampler(nn.Module):
    """`sampler` and `rejection_sampler` of a model runner (V1)."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._runner = [runner]  # in a list, for modules register modules
        self.num_calls = 0
        """Of either kind; the self-test looks whether it is this that draws."""

    def forward(self, *args: Any, logits: Tensor | None = None, **_: Any) -> Any:
        """Draw; called as the sampler by keywords, as the rejection sampler by position."""
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
        return output(verify(logits_RV, draws, drafts), logits_RV.device)


def output(drawn: Drawn, device: torch.device) -> Any:
    """As vLLM takes it."""
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput

    tokens_NW = drawn.tokens_NW.to(device)
    flat = tokens_NW.clamp(min=0).flatten()[:, None]
    ranks = torch.zeros(len(flat), dtype=torch.int32, device=device)
    logprobs = drawn.logprobs_NW.to(device).flatten()[:, None]
    return SamplerOutput(
        sampled_token_ids=tokens_NW, logprobs_tensors=LogprobsTensors(flat, logprobs, ranks)
    )


@cache
def _sampling(temperature: float, top_k: int, top_p: float) -> Sampling:
    """One object for equal ones: rows that share it are sampled in one go."""
    return Sampling(temperature, top_p, top_k, 0, frozenset())


__all__ = ["EXTRA", "CounterSampler", "Drawn", "arguments", "draws_of", "output", "verify"]
