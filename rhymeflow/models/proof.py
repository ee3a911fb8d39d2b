"""Proves that an engine or a learner computes the model (law 7).

Both run it in their own way: with plugged-in attention, fused layers and a separate head. Before
use, their log-probabilities of some thirty tokens are compared with those of transformers' own code
with eager attention, under the same weights. No second copy is made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from rhymeflow.errors import UserError
from rhymeflow.models import attention
from rhymeflow.models.lm_head import LMHead

_SIZES = ((1, 6), (7, 14), (7, 12))
"""Tokens of each prompt, and of both parts. The last two share a prefix beyond the prompt."""
_NEAR = 256  # a window or chunk of up to so many tokens is filled by one more prompt
_EXACT, _ROUNDED = 1e-2, 0.1
"""Tolerances in standard deviations of the logits. Correct results differ by 1e-5, in bfloat16 by
0.03 (SmolLM2-135M, 30 layers); wrong attention by 0.5 and more."""
_FLOATS = (torch.float32, torch.float64)

Sequences = list[tuple[list[int], int]]  # token ids, and how many of them are the prompt
OwnLogprobs = tuple[Tensor, float]
"""Log-probabilities of the tokens after each prompt, in nats, and the mean standard deviation of a
row of logits."""


def sequences(model: PreTrainedModel) -> Sequences:
    """Return the tokens to compare on. Raises `UserError` if the model has no separate body."""
    if attention.body_of(model) is model:
        raise _refused(model, "its body is not separate from its head")
    text_config = model.config.get_text_config()
    token_ids = []
    for i, (num_prompt, length) in enumerate((*_SIZES, *_beyond(text_config))):
        positions = range(min(length, text_config.max_position_embeddings))
        # The first ten tokens do not depend on `i`: they are the shared prefix.
        ids = [(3 + 7 * j * j + (j > 9) * i) % text_config.vocab_size for j in positions]
        token_ids.append((ids, num_prompt))
    return token_ids


def _beyond(text_config: PreTrainedConfig) -> list[tuple[int, int]]:
    """Return the size of a sequence that is longer than the shortest window or chunk, if that is
    longer than the other sequences."""
    reaches = [
        attention.Reach.of(text_config, layer) for layer in range(text_config.num_hidden_layers)
    ]
    lengths = [length for reach in reaches for length in reach if length is not None]
    shortest, longest = min(lengths, default=0), text_config.max_position_embeddings
    is_tried = _SIZES[1][1] <= shortest <= min(_NEAR, longest - 6)
    return [(shortest, shortest + 6)] if is_tried else []


def own_logprobs(model: PreTrainedModel, token_ids: Sequences) -> OwnLogprobs:
    """Compute the model's own log-probabilities. Raises `UserError` if it changes its logits after
    the head in a way that `LMHead` does not support."""
    logprobs, spread = [], 0.0
    with torch.no_grad(), _by_itself(model) as (head, hidden):
        for ids, num_prompt in token_ids:
            ids_1T = torch.tensor([ids], device=model.device)
            logits_TV = model(input_ids=ids_1T, use_cache=False).logits[0].float()
            if not hidden:  # OPT has called a module inside its body, not the body
                attention.body_of(model)(input_ids=ids_1T, use_cache=False)
            spread = float(logits_TV.std(dim=1).mean())
            # From the same hidden states, so exact in any precision.
            difference = (head.logits(hidden.pop()[0]) - logits_TV).abs().max()
            if not difference <= _EXACT * spread:
                raise _refused(model, "it changes its logits after the head in an unknown way")
            targets_T1 = ids_1T[0, num_prompt:, None]
            predictions_TV = logits_TV.log_softmax(-1)[num_prompt - 1 : -1]
            logprobs.append(predictions_TV.gather(1, targets_T1)[:, 0])
    return torch.cat(logprobs), spread


def check(model: PreTrainedModel, logprob_N: Tensor, expected: OwnLogprobs, who: str) -> None:
    """Raise `UserError` if the log-probabilities that `who` computed are not the model's own."""
    own_N, spread = expected
    error_N = (logprob_N.float().cpu() - own_N.cpu()).abs()
    is_exact = model.dtype in _FLOATS
    # In bfloat16 single tokens differ a lot if rounding selects another expert.
    error = float(error_N.max() if is_exact else error_N.median())
    if not error <= (_EXACT if is_exact else _ROUNDED) * spread:
        raise _refused(model, f"{who}'s log-probabilities are {error:.2g} nats off its own")


def _refused(model: PreTrainedModel, reason: str) -> UserError:
    kind = model.config.model_type
    return UserError(f"model.name: a model of type {kind!r} is not supported: {reason}")


@contextmanager
def _by_itself(model: PreTrainedModel) -> Iterator[tuple[LMHead, list[Tensor]]]:
    """Give the model its eager attention; each call of its body appends the last hidden states. Its
    head's products are float32, as `LMHead`'s: rounding would hide errors."""
    head, hidden = LMHead(model, many_rows=True), list[Tensor]()

    def product(module: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        is_rounded = output.dtype not in _FLOATS
        return head.product(inputs[0].flatten(0, -2)).view(output.shape) if is_rounded else output

    def keep(module: Any, inputs: Any, output: Any) -> None:
        hidden.append(output.last_hidden_state)

    hooks = [
        model.get_output_embeddings().register_forward_hook(product),
        attention.body_of(model).register_forward_hook(keep),
    ]
    model.set_attn_implementation("eager")
    try:
        yield head, hidden
    finally:
        model.set_attn_implementation(attention.NAME)
        for hook in hooks:
            hook.remove()
