"""Proof that an engine or a learner computes the model (law 7).

Both run it their own way: attention plugged in, layers fused, the head apart. Before use, their
log-probabilities of some thirty tokens are compared with those of transformers' own code with eager
attention, under the weights that they will use. No second copy is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rhymeflow.errors import UserError
from rhymeflow.models import attention
from rhymeflow.models.lm_head import LMHead

_SIZES = ((1, 6), (7, 14), (7, 12))
"""Tokens of the prompt, and in all. The last two have the prompt, and more, in common."""
_EXACT, _ROUNDED = 1e-2, 0.1
"""Differences allowed, in standard deviations of the logits. Right ones are 1e-5 and, in bfloat16,
0.03 (SmolLM2-135M, 30 layers); wrong attention is 0.5 and more."""
_FLOATS = (torch.float32, torch.float64)

Sequences = list[tuple[list[int], int]]
"""Tokens, and how many of them are the prompt."""
Own = tuple[Tensor, float]
"""Log-probabilities of the tokens after each prompt, in nats, and the standard deviation of a row
of logits."""


def sequences(model: PreTrainedModel) -> Sequences:
    """The tokens to compare on.

    Raises:
        UserError: the model has no body apart from its head.
    """
    if model.base_model is model:
        raise _refused(model, "its body is not apart from its head")
    text = model.config.get_text_config()
    found = []
    for i, (prompt, length) in enumerate(_SIZES):
        places = range(min(length, text.max_position_embeddings))
        ids = [(3 + 7 * j * j + (j > 9) * i) % text.vocab_size for j in places]
        found.append((ids, prompt))
    return found


def own(model: PreTrainedModel, given: Sequences) -> Own:
    """Compute the model's own log-probabilities.

    Raises:
        UserError: it changes its logits after the head in a way that `LMHead` does not know.
    """
    logprobs, spread = [], 0.0
    with torch.no_grad(), _by_itself(model) as (head, hidden):
        for ids, prompt in given:
            ids_1T = torch.tensor([ids], device=model.device)
            logits_TV = model(input_ids=ids_1T, use_cache=False).logits[0].float()
            if not hidden:  # as OPT, which calls what is inside its body
                model.base_model(input_ids=ids_1T, use_cache=False)
            spread = float(logits_TV.std(dim=1).mean())
            # Of the same hidden states, so to be exact in any precision.
            difference = (head.logits(hidden.pop()[0]) - logits_TV).abs().max()
            if not difference <= _EXACT * spread:
                raise _refused(model, "it changes its logits after the head in a way of its own")
            targets_T1 = ids_1T[0, prompt:, None]
            logprobs.append(logits_TV.log_softmax(-1)[prompt - 1 : -1].gather(1, targets_T1)[:, 0])
    return torch.cat(logprobs), spread


def check(model: PreTrainedModel, logprob_N: Tensor, expected: Own, who: str) -> None:
    """Raise `UserError` if `who` found other log-probabilities than the model by itself."""
    own_N, spread = expected
    error_N = (logprob_N.float().cpu() - own_N.cpu()).abs()
    is_exact = model.dtype in _FLOATS
    # In bfloat16 single tokens differ by much where rounding chooses another expert.
    error = float(error_N.max() if is_exact else error_N.median())
    if not error <= (_EXACT if is_exact else _ROUNDED) * spread:
        raise _refused(model, f"{who}'s log-probabilities are {error:.2g} nats off its own")


def _refused(model: PreTrainedModel, reason: str) -> UserError:
    kind = model.config.model_type
    return UserError(f"model.name: a model of type {kind!r} is not supported: {reason}")


@contextmanager
def _by_itself(model: PreTrainedModel) -> Iterator[tuple[LMHead, list[Tensor]]]:
    """The model with its own attention; each call of its body appends the last hidden states.

    Its head's products are float32, as ours are: rounding would hide what is wrong.
    """
    head, hidden = LMHead(model, many_rows=True), list[Tensor]()

    def product(module: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        is_rounded = output.dtype not in _FLOATS
        return head.product(inputs[0].flatten(0, -2)).view(output.shape) if is_rounded else output

    def keep(module: Any, inputs: Any, output: Any) -> None:
        hidden.append(output.last_hidden_state)

    hooks = [
        model.get_output_embeddings().register_forward_hook(product),
        model.base_model.register_forward_hook(keep),
    ]
    model.set_attn_implementation("eager")
    try:
        yield head, hidden
    finally:
        model.set_attn_implementation(attention.NAME)
        for hook in hooks:
            hook.remove()
