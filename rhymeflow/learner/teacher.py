"""Teachers of on-policy distillation: how likely they find the tokens that the policy sampled.

A teacher may read another prompt before the same tokens (`MicroBatch.for_teacher`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from rhymeflow.config import DistillationConfig
from rhymeflow.errors import UserError
from rhymeflow.learner.logprobs import Logits, TokenScorer
from rhymeflow.learner.packing import PackedRow
from rhymeflow.models.lm_head import LMHead
from rhymeflow.models.logits import shaped
from rhymeflow.utils import progress
from rhymeflow.utils.openai_api import asking

Result = TypeVar("Result")


@dataclass(frozen=True)
class ModelTeacher:
    """A model on the learner's ranks: a frozen one, or the policy (`is_policy`). With several
    ranks (`is_sharded`) methods are collectives."""

    scorer: TokenScorer
    is_policy: bool
    is_sharded: bool

    def scores(self, rows: Sequence[PackedRow]) -> list[Tensor]:
        """Return the log-probabilities of each row's response tokens, float32 [R] each."""
        found = []
        for row in rows:
            self._check(row)
            found.append(self.scorer.score(row)[0])
            progress.advance()
        return found

    def beside(self, row: PackedRow, work: Callable[[Logits], Result]) -> Result:
        """Call `work`, which runs the policy, with the teacher's logits of the row, a chunk at a
        time; return its result."""
        self._check(row)
        scorer = self.scorer

        @cache
        def body() -> tuple[Tensor, LMHead]:
            return scorer.hidden(row), LMHead(scorer.model, many_rows=True)

        @torch.no_grad()
        def logits(chunk: slice) -> Tensor:
            hidden_RD, head = body()
            logits_CV, temperature = head.logits(hidden_RD[chunk]), scorer.rollout.temperature
            return shaped(logits_CV, temperature=temperature, top_k=0, top_p=1.0)

        def inside() -> Result:
            body()
            with torch.enable_grad():
                return work(logits)

        if self.is_policy:  # its weights are whole on this rank inside `work`
            return work(logits)
        with torch.no_grad():
            if self.is_sharded:  # the head is whole on this rank while this runs
                return scorer.forward(inside)
            scorer.forward(body)
        return work(logits)

    def _check(self, row: PackedRow) -> None:
        context = self.scorer.model.config.get_text_config().max_position_embeddings
        if (longest := int(row.positions_T.max()) + 1) > context:
            raise UserError(
                f"learner.distillation.teacher: reads {longest} tokens; its context is {context}"
            )


class ServedTeacher:
    """A model on a server with OpenAI's interface and vLLM's `prompt_logprobs`."""

    def __init__(self, config: DistillationConfig, device: torch.device) -> None:
        self._url, self._device = str(config.teacher), device
        self._named = {} if config.server_model is None else {"model": config.server_model}
        completions = f"{self._url.rstrip('/')}/completions"
        key, limits = config.api_key_variable, (config.timeout, config.retries)
        self._ask = asking(completions, *limits, api_key_variable=key)
        self._pool = ThreadPoolExecutor(config.concurrency, "teacher")

    def scores(self, rows: Sequence[PackedRow]) -> list[Tensor]:
        """Return what a `ModelTeacher` does. Raises `UserError` if a response has no answer after
        all tries, or another than was asked for."""
        submit = self._pool.submit
        asked = [[submit(self._score, *each) for each in _responses(row)] for row in rows]
        waiting = {each for some in asked for each in some}
        while waiting:  # which is not hanging: each request has its time limit
            done, waiting = wait(waiting, timeout=1.0, return_when=FIRST_EXCEPTION)
            progress.advance()
            for each in done:
                if each.exception() is not None:
                    self._pool.shutdown(wait=False, cancel_futures=True)
                    each.result()
        found = []
        for row, answers in zip(rows, asked, strict=True):
            values = [value for answer in answers for value in answer.result()]
            values = values or [0.0] * len(row.targets_R)  # of an empty row
            found.append(torch.tensor(values, dtype=torch.float32, device=self._device))
        return found

    def _score(self, tokens: list[int], places: list[int]) -> list[float]:
        """Return the log-probabilities of the tokens at these places."""
        try:
            answer = self._ask(
                prompt=tokens, max_tokens=1, temperature=0.0, prompt_logprobs=1, **self._named
            )
            return [_logprob(answer, place, tokens[place]) for place in places]
        except (ConnectionError, ValueError) as error:
            problem = f"learner.distillation.teacher = {self._url!r}: {error}"
            raise UserError(problem) from None


def _responses(row: PackedRow) -> list[tuple[list[int], list[int]]]:
    """Return for each member of a row its tokens, and the places among them of the sampled ones."""
    found, start = [], 0
    for length, sequence in zip(row.lengths, row.sequences, strict=False):  # empty: no lengths
        part = slice(start, start + length)
        tokens = row.tokens_T[sequence].tolist()
        places = (row.positions_T[row.predictors_R[part]] + 1).tolist()
        if places[-1] == len(tokens):  # the last token of a response predicts nothing
            tokens.append(int(row.targets_R[part][-1]))
        found.append((tokens, places))
        start += length
    return found


def _logprob(answer: dict[str, Any], place: int, token: int) -> float:
    where = f"token {token} at place {place}"
    try:
        value = answer["choices"][0]["prompt_logprobs"][place][str(token)]["logprob"]
    except (LookupError, TypeError):
        raise ValueError(f"the answer has no prompt_logprobs of {where}") from None
    if not isinstance(value, float | int) or not math.isfinite(value):
        raise ValueError(f"the answer has {value!r} as the log-probability of {where}")
    return float(value)
