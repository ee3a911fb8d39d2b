"""Noise by counter for vLLM's second model runner (V2): a logits processor that decides the token.

V2 has no sampler to take the place of, but its logits processors are a public interface, know each
row's request and position, and stay active while drafts are verified. So vLLM is asked for
temperature 0, and the processor leaves one token of each row: the one that the native engine would
draw. Greedy verification is then exact acceptance (law 3). That token's logit is set to its
log-probability under the distribution that was sampled, and vLLM reports it as it stands
(`logprobs_mode: processed_logits`).

Holds true: nothing waits for the device. The functions know no vLLM; `noise_processor` makes the
class that vLLM loads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rhymeflow.engine.native import noise
from rhymeflow.engine.vllm.sampler import EXTRA
from rhymeflow.models.logits import shaped

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


__all__ = ["Slots", "decide", "noise_processor"]
