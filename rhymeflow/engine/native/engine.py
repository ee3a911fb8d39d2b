"""The native rollout engine: each step schedules, runs the model once, and samples.

Between two steps responses can be interrupted or moved, and weights changed. Drafted tokens run
together with the token they follow; those that the model also samples are kept (`verify.py`), and
lowering `Sequence.cached` discards the others. No CUDA graphs are used."""

from __future__ import annotations

import sys
from collections.abc import Container, Hashable, Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rhymeflow.emulation import Pace
from rhymeflow.engine.base import Finished, Load, NoiseKey, Request, Sampling, Segment
from rhymeflow.engine.drafter import Drafting, is_linear
from rhymeflow.engine.native import noise
from rhymeflow.engine.native.attention import attention_for
from rhymeflow.engine.native.body import body_for
from rhymeflow.engine.native.cache import CacheSpan, KeptCaches, KVCache
from rhymeflow.engine.native.sampler import Draws, sample
from rhymeflow.engine.native.scheduler import IterationPlan, Scheduler, SequenceWork
from rhymeflow.engine.native.sequence import Sequence
from rhymeflow.engine.native.verify import accepted, depths
from rhymeflow.errors import UserError
from rhymeflow.histospec.draft import Draft
from rhymeflow.histospec.drafter import Drafter
from rhymeflow.models import attention, proof
from rhymeflow.models.lm_head import LMHead
from rhymeflow.models.lora import keeps_base

PAD_ROWS = 8
"""More rows than this are rounded up to a multiple of it. Drafts make the number vary, and oneDNN
prepares a matrix product for each new number of rows and caches about two hundred: five products of
the demo's shapes with 100 to 160 rows took 1.3 to 5.8 ms if their number was cached, and 9 to 15 ms
if not (docs/lab-log.md)."""


class Engine:
    """Continuous batching over one model.

    `model` must be loaded with `attn_implementation=models.attention.NAME` and be in eval mode.
    `seed` is the run's. `instance` and `version` are recorded in the segments of each response.
    The cache has at most `kv_capacity` tokens, unless a response alone has more (see `scheduler`);
    None: as many as fit. Between two turns a response keeps its part if there is room: at most
    `max_num_seqs` do; without `kv_capacity` none does."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        seed: int,
        max_num_seqs: int,
        max_prefill_tokens: int,
        instance: str,
        version: int,
        kv_capacity: int | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        config = model.config.get_text_config()
        assert config._attn_implementation == attention.NAME, config._attn_implementation
        self.seed, self.instance, self.version = seed, instance, version
        self.max_length: int = config.max_position_embeddings
        self._vocabulary: int = config.vocab_size
        self._num_generated, self._tokens_per_sequence, self._prefill_seconds = 0, 0.0, 0.0
        self._model = model
        self._device = model.device
        with torch.inference_mode():
            self._lm_head = LMHead(model)
            self._body = body_for(model)
        self._scheduler = Scheduler(
            max_num_seqs=max_num_seqs,
            max_prefill_tokens=max_prefill_tokens,
            kv_capacity=kv_capacity or sys.maxsize,
        )
        shape = attention.Shape.of(config)
        self._attention = attention_for(self._device, model.dtype, shape.head_dim)
        self._cache = KVCache(shape, model.dtype, self._device)
        self._kept, self._kv_capacity = KeptCaches(self._cache, max_num_seqs), kv_capacity or 0
        self._sequences: dict[Hashable, Sequence] = {}
        self._drafting = Drafting(vocabulary=self._vocabulary, max_sequences=max_num_seqs)
        self._drafting.use(drafter)
        self.pace = Pace()
        self._started = 0.0
        self._modelled: float | None = None  # see `Pace.charge`

    def prove(self) -> None:
        """Compare the engine's log-probabilities with the model's own; see `models/proof.py`. Call
        it before anything is submitted, without a drafter. Raises `UserError` if they differ."""
        assert not self.has_work
        assert self._drafting.drafter is None
        requests = []
        for i, (ids, num_prompt) in enumerate(proof.sequences(self._model)):
            sampling = Sampling(1.0, 1.0, 0, len(ids) - num_prompt, frozenset())
            requests.append(Request(("proof", i), ids[:num_prompt], NoiseKey(i, 0, 0), sampling))
            self.submit(requests[-1])
        while self.has_work:
            self.step()
        sampled = [([*each.prompt_ids, *each.tokens], len(each.prompt_ids)) for each in requests]
        expected = proof.own_logprobs(self._model, sampled)
        logprob_N = torch.tensor([x for each in requests for x in each.logprobs])
        proof.check(self._model, logprob_N, expected, "the native engine")
        self._num_generated, self._tokens_per_sequence, self._prefill_seconds = 0, 0.0, 0.0

    @property
    def has_work(self) -> bool:
        """Whether any request runs or waits."""
        return bool(self._sequences)

    @property
    def kv_tokens(self) -> int:
        """Cached tokens of running requests, and of waiting ones that kept their cache."""
        return sum(sequence.held for sequence in self._sequences.values())

    def load(self) -> Load:
        """Return the engine's current state."""
        scheduler = self._scheduler
        return Load(
            len(scheduler.running),
            tuple(each.request.id for each in (*scheduler.urgent, *scheduler.waiting)),
            self.kv_tokens,
            self._tokens_per_sequence,
            self._num_generated,
            self._drafting.stats(),
            self._prefill_seconds,
            self.pace.behind,
        )

    @torch.inference_mode()
    def submit(self, request: Request) -> None:
        """Queue a request, new or interrupted. Raises `UserError` if the model cannot hold it."""
        assert request.id not in self._sequences, f"request {request.id} is here already"
        assert len(request.logprobs) <= len(request.tokens)
        longest = len(request.prompt_ids) + request.sampling.max_new_tokens
        if longest > self.max_length:
            raise UserError(
                f"request {request.id}: {len(request.prompt_ids)} prompt tokens and up to "
                f"{request.sampling.max_new_tokens} new ones are more than the model's "
                f"max_position_embeddings = {self.max_length}"
            )
        beyond = max([*request.prompt_ids, *request.tokens], default=0)
        if beyond >= self._vocabulary:
            raise UserError(
                f"request {request.id}: token {beyond} is outside the model's vocabulary of "
                f"{self._vocabulary} tokens"
            )
        if not request.prompt_ids:
            raise UserError(f"request {request.id}: the prompt is empty")
        sequence = Sequence(
            request,
            noise.stream(self.seed, request.noise_key),
            [*request.prompt_ids, *request.tokens],
            tuple(request.prompt_ids),
        )
        assert request.finish_reason() is None, f"request {request.id} is complete"
        kept = self._kept.take(request, sequence.ids)
        if kept is not None:
            sequence.slot, sequence.cached = kept.slot, kept.cached
            sequence.has_prompt = kept.has_prompt
        self._sequences[request.id] = sequence
        self._scheduler.submit(sequence)

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Run one iteration; return the responses that it completed."""
        self.pace.begin()
        started = self._started = self.pace.now()
        plan = self._scheduler.plan()
        if not plan.work:
            return []
        self._drafting.end([sequence.request.id for sequence in plan.evicted])
        for sequence in plan.dropped:
            if sequence.slot is not None:
                self._cache.release(sequence.slot)
            sequence.slot, sequence.is_mixed = None, False
        work = plan.work = self._drafted(plan)
        self._kept.fit(plan.room if self._kv_capacity else 0)
        decoded, prefilled, cached = plan.rows()
        searched = self._drafting.num_searched
        self._modelled = self.pace.charge(decoded, prefilled, cached, searched)
        hidden_TD = self._run(work, self._attention(self._place(plan)))
        self._scheduler.advance(work)
        finished = self._postprocess(work, hidden_TD)
        self.pace.end(is_idle=not self._sequences)
        if prefilled:
            share = prefilled / (decoded + prefilled)
            self._prefill_seconds += (self.pace.now() - started) * share
        return finished

    @torch.inference_mode()
    def interrupt(self, ids: Iterable[Hashable] | None = None) -> list[Request]:
        """Stop requests (None: all of them) and return them; unknown ids are skipped."""
        chosen = list(self._sequences) if ids is None else ids
        sequences = [self._sequences[key] for key in chosen if key in self._sequences]
        self._forget(sequences)
        if not self._sequences:
            self.pace.rest()
        return [sequence.request for sequence in sequences]

    @torch.inference_mode()
    def set_version(self, version: int, *, keep_cache: bool) -> None:
        """Continue with weights that were changed in place; see `RolloutEngine.install`."""
        self.version = version
        self._kept.clear()
        if not keeps_base(self._model):
            self._lm_head.refresh()
        self._body.refresh()
        for sequence in self._sequences.values():  # waiting ones may have kept their cache
            if not keep_cache:
                sequence.cached = 0
            sequence.is_mixed = sequence.cached > 0

    def _drafted(self, plan: IterationPlan) -> list[SequenceWork]:
        """Return the work, with drafts added for sequences that are ready to decode, as far as
        there is room for them."""
        before, work = self.pace.now(), plan.work
        ready = [item.sequence.request for item in work if item.sequence.remaining == 1]
        other_rows = sum(item.num_new for item in work) - len(ready)
        drafts = self._drafting.propose(
            ready, other_rows=other_rows, kv_tokens=self.kv_tokens, room=plan.room
        )
        self._started += self.pace.now() - before  # the drafter's time does not count
        if not drafts:
            return work
        drafted = []
        for item in work:
            draft = drafts.get(item.sequence.request.id)
            if draft is not None:
                item = SequenceWork(item.sequence, 1 + len(draft.tokens), draft)
                plan.room -= len(draft.tokens)
            drafted.append(item)
        return drafted

    def _place(self, plan: IterationPlan) -> list[CacheSpan]:
        """Make room in the cache and copy shared prefixes; return the spans of the plan's work."""
        cache = self._cache
        for donor, sequence, length in plan.prefix_copies:
            sequence.slot = cache.copied(donor.slot, sequence.slot, length)
        spans = []
        for each, num_new, draft in plan.work:
            slot = each.slot = cache.reserve(each.slot, each.cached, num_new)
            each.has_prompt = not slot.start or slot.start <= cache.first_kept(len(each.prompt) - 1)
            parents = None if is_linear(draft) else draft.parents
            spans.append(CacheSpan(slot, each.cached - slot.start, num_new, parents))
        return spans

    def _run(self, work: list[SequenceWork], row_attention: attention.Attention) -> Tensor:
        """Run the model's body over the packed row; return hidden states, [T + padding, D]."""
        ids: list[int] = []
        positions: list[int] = []
        for sequence, num_new, draft in work:
            end = sequence.cached + num_new - len(draft.tokens)
            ids += sequence.ids[sequence.cached : end]
            ids += draft.tokens
            positions += range(sequence.cached, end)
            if draft.tokens:
                positions += [end - 1 + depth for depth in depths(draft.parents)]
        unused = _padded(len(ids)) - len(ids)
        ids += [0] * unused
        positions += [0] * unused
        return self._body.run(ids, positions, row_attention)

    def _postprocess(self, work: list[SequenceWork], hidden_TD: Tensor) -> list[Finished]:
        """Sample for each ready sequence and its draft; remove and return completed responses."""
        ready, rows, draws = _to_sample(work)
        if not ready:
            return []
        num_rows = len(rows)
        if num_rows < sum(item.num_new for item in work):
            rows += rows[-1:] * (_padded(num_rows) - num_rows)
            hidden_TD = hidden_TD[rows]
        logits_RV = self._lm_head.logits(hidden_TD)
        tokens, logprobs = sample(logits_RV[:num_rows], draws)
        finished, ended, generated, first = [], [], [], 0
        for sequence, draft in ready:
            end = first + 1 + len(draft.tokens)
            generated.append(self._append(sequence, draft, tokens[first:end], logprobs[first:end]))
            first = end
            if reason := sequence.request.finish_reason():
                finished.append(Finished(sequence.request, reason))
                ended.append(sequence)
        num_generated = sum(map(len, generated))
        self._num_generated += num_generated
        self._tokens_per_sequence += num_generated / len(generated)
        ids = [sequence.request.id for sequence, _ in ready]
        self._drafting.observe(
            dict(zip(ids, generated, strict=True)),
            rows=sum(item.num_new for item in work),
            seconds=self._modelled or self.pace.now() - self._started,
        )
        kept = [s for s in ended if s.request.keeps_cache and s.cached and not s.is_mixed]
        self._forget(ended, kept)
        for sequence in kept:
            self._kept.put(sequence)
        self._kept.fit(self._kv_capacity - self.kv_tokens)
        return finished

    def _append(
        self, sequence: Sequence, draft: Draft, sampled: list[int], logprobs: list[float]
    ) -> list[int]:
        """Append the tokens sampled along the accepted path, up to the turn's end; return them."""
        request = sequence.request
        request.steps += 1
        request.drafted += len(draft.tokens)
        segment = Segment(len(request.tokens), self.version, self.instance)
        path = accepted(draft, sampled)
        rows = [0, *(node + 1 for node in path)]
        tokens = [sampled[row] for row in rows]
        num_accepted = len(path)  # also those after the turn's end, which are cut next
        end = request.kept(tokens)
        del tokens[end:], rows[end:], path[end - 1 :]
        known = len(sequence.ids)
        if path and path[-1] >= len(path):  # it skips nodes: join its keys and values
            self._cache.gather(sequence.slot, known, [known + node for node in path])
        sequence.extend(tokens, [logprobs[row] for row in rows], segment, num_accepted)
        sequence.cached = known + len(path)  # the last token has not run
        return tokens

    def _forget(self, sequences: list[Sequence], kept: Container[Sequence] = ()) -> None:
        """Remove sequences, and release the slots of those that are not in `kept`."""
        if not sequences:
            return
        self._drafting.end([sequence.request.id for sequence in sequences])
        self._scheduler.remove(sequences)
        for sequence in sequences:
            del self._sequences[sequence.request.id]
            if sequence.slot is not None and sequence not in kept:
                self._cache.release(sequence.slot)
                sequence.slot = None


def _to_sample(
    work: list[SequenceWork],
) -> tuple[list[tuple[Sequence, Draft]], list[int], list[Draws]]:
    """Return the sequences that are ready, with their drafts; the rows after which their tokens are
    sampled, consecutive for each sequence; and how they are sampled."""
    ready: list[tuple[Sequence, Draft]] = []
    rows: list[int] = []
    draws: list[Draws] = []
    end = 0
    for sequence, num_new, draft in work:
        end += num_new
        size = len(draft.tokens)
        if sequence.remaining + size == 0:  # `cached` counts the draft, `ids` do not have it
            rows += range(end - 1 - size, end)
            start = len(sequence.request.tokens)
            positions = [start]
            if size:
                positions += [start + depth for depth in depths(draft.parents)]
            draws.append(Draws(sequence.request.sampling, sequence.stream, positions))
            ready.append((sequence, draft))
    return ready, rows, draws


def _padded(rows: int) -> int:
    return rows if rows <= PAD_ROWS else -(-rows // PAD_ROWS) * PAD_ROWS
