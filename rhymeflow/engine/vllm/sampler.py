"""Noise by counter in vLLM (law 3): a sampler for its model runner V1, a logits processor for V2.

vLLM's own draws depend on earlier draws and on drafts; here a token is drawn as in the native
engine, and a draft is accepted while it equals what was drawn. V2's logits processors know each
row's request and position, so there vLLM samples at temperature 0 from the one token that the
processor leaves in each row, its log-probability as logit: greedy verification is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rhymeflow.engine.base import Sampling
from rhymeflow.engine.native.sampler import Draws, sample

EXTRA = "rhymeflow"
"""The key of `arguments` in a request's `extra_args`."""

PLACEHOLDER = -1
"""What vLLM skips in a row of tokens."""


def arguments(how: Sampling, stream: int, num_prompt: int) -> dict[str, Any]:
    """`extra_args` of a request whose response begins after `num_prompt` tokens."""
    return {EXTRA: [str(stream), num_prompt, how.temperature, how.top_k, how.top_p]}


def draws_of(extra_args: dict[str, Any], num_tokens: int, num_rows: int) -> Draws:
    """The draws of a request's next rows; it has `num_tokens`, prompt included."""
    stream, num_prompt, temperature, top_k, top_p = extra_args[EXTRA]
    first = num_tokens - num_prompt
    # A prompt that is still being prefilled has a row too, whose token vLLM throws away.
    positions = [max(first + i, 0) for i in range(num_rows)]
    how = Sampling(temperature, top_p, top_k, 0, frozenset())
    return Draws(how, int(stream), positions)


def verify(
    logits_RV: Tensor, draws: list[Draws], drafts: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Draw a token in every row; keep each request's drawn tokens up to its first wrong draft.

    A request has one row more than drafted tokens: the i-th row's logits are those after i of them.
    Returns tokens, int32 [n, W], with `PLACEHOLDER` after the last that stands, and their
    log-probabilities, float32 [n, W].
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
    return torch.tensor(stand, dtype=torch.int32), torch.tensor(likely)


class CounterSampler(nn.Module):
    """`sampler` and `rejection_sampler` of a model runner (V1).

    It reads `requests[id].sampling_params.extra_args`, `input_batch.req_ids` and
    `input_batch.num_tokens_no_spec` of the runner.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._runner = [runner]  # in a list, for modules register modules
        self.num_calls = 0
        """For the self-test: whether it is this that draws."""

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
        return output(*verify(logits_RV, draws, drafts), logits_RV.device)


def output(tokens_NW: Tensor, logprobs_NW: Tensor, device: torch.device) -> Any:
    """What was drawn, as vLLM takes it."""
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput

    tokens_NW = tokens_NW.to(device)
    flat = tokens_NW.clamp(min=0).flatten()[:, None]
    ranks = torch.zeros(len(flat), dtype=torch.int32, device=device)
    logprobs = logprobs_NW.to(device).flatten()[:, None]
    return SamplerOutput(
        sampled_token_ids=tokens_NW, logprobs_tensors=LogprobsTensors(flat, logprobs, ranks)
    )


# -- The second runner -----------------------------------------------------------------------------

_UNUSED = arguments(Sampling(0.0, 1.0, 0, 0, frozenset()), 0, 0)
"""Of a slot that no request has taken: vLLM tries its sampler on such."""


def decide(
    logits_RV: Tensor, extra_args: Sequence[dict[str, Any]], positions: Sequence[int]
) -> Tensor:
    """Return logits [R, V] that are -inf but for the token drawn, which has its log-probability.

    `extra_args`: of each row's request; `positions`: in its sequence, of the token that is sampled.
    """
    draws = [draws_of(extra, place, 1) for extra, place in zip(extra_args, positions, strict=True)]
    tokens, logprobs = sample(logits_RV.float(), draws)
    decided_RV = torch.full_like(logits_RV, -torch.inf)
    decided_RV[range(len(tokens)), tokens] = torch.tensor(logprobs).to(logits_RV)
    return decided_RV


def noise_processor() -> type:
    """The class for vLLM's `logits_processors`."""
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor

    class NoiseProcessor(LogitsProcessor):  # type: ignore[misc]
        """Leaves the token that is drawn."""

        def __init__(self, vllm_config: Any, req_states: Any) -> None:
            self._arguments = [_UNUSED] * req_states.max_num_reqs
            """By slot."""

        def add_request(self, req_idx: int, sampling_params: Any) -> bool:
            """A request takes a slot."""
            self._arguments[req_idx] = sampling_params.extra_args
            return True

        def apply(self, logits: Tensor, ctx: Any) -> Tensor:
            """Decide each row."""
            extra_args = [self._arguments[slot] for slot in ctx.expanded_idx_mapping.tolist()]
            return decide(logits, extra_args, (ctx.pos + 1).tolist())

    return NoiseProcessor
