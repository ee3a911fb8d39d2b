"""Noise by counter in vLLM (law 3): a sampler for its model runner V1, a logits processor for V2.

vLLM's own draws depend on what was drawn before, and on drafts. Here a token is a function of its
logits, the response's noise stream and its position, as in the native engine. A draft stands while
it equals what was drawn, so tokens are those that decoding one by one would have given.

In V1 `CounterSampler` takes the place of the sampler and of the rejection sampler. V2's logits
processors know each row's request and position, and stay active while drafts are verified. So vLLM
is asked for temperature 0, and the processor leaves one token of each row: greedy verification is
then exact acceptance. That token's logit is its log-probability, which vLLM reports as it stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from rhymeflow.engine.base import Sampling
from rhymeflow.engine.native import noise
from rhymeflow.engine.native.sampler import Draws, sample
from rhymeflow.models.logits import shaped

EXTRA = "rhymeflow"
"""Where in a request's `extra_args` its noise and its distribution are: `arguments`."""

PLACEHOLDER = -1
"""What vLLM skips in a row of tokens."""


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


@cache
def _sampling(temperature: float, top_k: int, top_p: float) -> Sampling:
    """One object for equal ones: rows that share it are sampled in one go."""
    return Sampling(temperature, top_p, top_k, 0, frozenset())


# -- The second runner -----------------------------------------------------------------------------

Distribution = tuple[float, int, float]
"""Temperature, top-k, top-p."""


class Slots:
    """What each of vLLM's request slots samples with."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.stream_S = torch.zeros(count, dtype=torch.int64, device=device)
        self.num_prompt_S = torch.zeros(count, dtype=torch.int64, device=device)
        self.kind_S = torch.zeros(count, dtype=torch.int64, device=device)
        """Number of the distribution."""
        self._kinds: dict[Distribution, int] = {}
        self._kind_of: list[int] = [0] * count

    def set(self, slot: int, extra_args: dict[str, Any]) -> None:
        """A request takes the slot."""
        stream, num_prompt, *distribution = extra_args[EXTRA]
        temperature, top_k, top_p = distribution
        kind = self._kinds.setdefault((temperature, top_k, top_p), len(self._kinds))
        self._kind_of[slot] = kind
        self.stream_S[slot] = noise._signed(int(stream))
        self.num_prompt_S[slot] = num_prompt
        self.kind_S[slot] = kind

    def distributions(self, slots: Iterable[int]) -> list[tuple[int, Distribution]]:
        """Those of these slots, with their numbers."""
        used = {self._kind_of[slot] for slot in slots}
        return [(number, how) for how, number in self._kinds.items() if number in used]


def decide(
    logits_RV: Tensor, slots: Slots, slot_R: Tensor, position_R: Tensor, used: Iterable[int]
) -> Tensor:
    """Return logits [R, V] that are -inf but for the token drawn, which has its log-probability.

    `slot_R`: each row's slot; `position_R`: in its sequence, of the token that is sampled; `used`:
    slots that rows can have.
    """
    place_R = (position_R.long() - slots.num_prompt_S[slot_R]).clamp(min=0)
    # A row's key is the hash of its stream and position, as in `noise.row_keys`.
    keys_R = noise._words(slots.stream_S[slot_R], place_R)
    kind_R = slots.kind_S[slot_R]
    token_R = torch.zeros_like(keys_R)
    logprob_R = torch.zeros(len(keys_R), dtype=torch.float32, device=logits_RV.device)
    for number, (temperature, top_k, top_p) in slots.distributions(used):
        x_RV = shaped(logits_RV, temperature=temperature, top_k=top_k, top_p=top_p)
        drawn_R = x_RV.argmax(1) if temperature == 0.0 else noise.draw(x_RV, keys_R)
        its_R = x_RV.gather(1, drawn_R[:, None])[:, 0] - x_RV.logsumexp(1)
        is_its_R = kind_R == number
        token_R = torch.where(is_its_R, drawn_R, token_R)
        logprob_R = torch.where(is_its_R, its_R, logprob_R)
    decided_RV = torch.full_like(logits_RV, -torch.inf)
    return decided_RV.scatter_(1, token_R[:, None], logprob_R.to(logits_RV.dtype)[:, None])


def noise_processor() -> type:
    """The class for vLLM's `logits_processors`."""
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor

    class NoiseProcessor(LogitsProcessor):  # type: ignore[misc]
        """Leaves the token that is drawn."""

        def __init__(self, vllm_config: Any, req_states: Any) -> None:
            self._slots = Slots(req_states.max_num_reqs, req_states.device)

        def add_request(self, req_idx: int, sampling_params: Any) -> bool:
            """A request takes a slot."""
            self._slots.set(req_idx, sampling_params.extra_args)
            return True

        def apply(self, logits: Tensor, ctx: Any) -> Tensor:
            """Decide each row."""
            used = ctx.idx_mapping_np.tolist()
            slots = ctx.expanded_idx_mapping.long()
            return decide(logits, self._slots, slots, ctx.pos + 1, used)

    return NoiseProcessor
