"""Finds drafts for running sequences in the live and the history index.

In each index a sequence has candidates: positions where the preceding tokens equal the sequence's
last ones (longest suffixes first, newest text first, see `kernels.LEVELS`), and the same position
in responses with the same prompt, sample and noise. Candidates that predicted the next tokens are
kept; when too few are left, the indexes are searched again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rhymeflow.config import DraftingConfig
from rhymeflow.histospec import build_draft, kernels
from rhymeflow.histospec.build_draft import NUM_CLASSES, Proposals, Texts
from rhymeflow.histospec.index import Index, prompt_key

_NEARNESS = (1.0, 2.0, 2.0, 2.0)  # by origin: another prompt, the prompt, the sequence, aligned


class Contexts(NamedTuple):
    """The context of each sequence, by handle."""

    recent: np.ndarray  # int32 [H, MEMORY]: its last tokens, the newest at the end
    known: np.ndarray  # int64 [H]: how many entries of `recent`, from the end, are tokens
    length: np.ndarray  # int64 [H]: tokens of the response
    prompt: np.ndarray  # int64 [H]: key of the prompt
    sample: np.ndarray  # int64 [H]: number of the response among the prompt's
    noise: np.ndarray  # int64 [H]: epoch of its noise
    itself: np.ndarray  # uint64 [H]: key of prompt, sample and noise together


class Candidates(NamedTuple):
    """The candidates of each sequence, by handle: those found by suffix, then aligned ones."""

    at: np.ndarray
    """int64 [H, PLACES]: position that corresponds to the sequence's last token; 0: none."""
    sources: np.ndarray  # int32 [H, PLACES]: number of the candidate's index
    matched: np.ndarray  # int32 [H, PLACES]: number of matching tokens, up to `at`
    kinds: np.ndarray  # int32 [H, PLACES]: origins, see `kernels`
    merits: np.ndarray  # float32 [H, PLACES]: weights by reward
    found: np.ndarray  # int64 [H]: number of candidates found by suffix
    needed: np.ndarray  # int64 [H]: the indexes are searched again when `found` is below this
    seen: np.ndarray  # int64 [H]: length of the response at which the candidates were last updated
    age: np.ndarray  # int64 [H]: tokens since the last search


class Search:
    """Makes proposals for the sequences of one engine, at most `max_sequences` at a time. `rates`
    float32 [NUM_CLASSES] is read at every proposal; its owner may change it in place. Nothing is
    drafted after a token in `stop_ids`: a turn ends with it, and what follows in the history is the
    environment's."""

    def __init__(
        self,
        live: Index,
        history: Index | None,
        drafting: DraftingConfig,
        *,
        max_sequences: int,
        rates: np.ndarray,
        stop_ids: Collection[int] = (),
    ) -> None:
        assert rates.shape == (NUM_CLASSES,)
        assert rates.dtype == np.float32
        nothing = Index(max_tokens=1, max_responses=1)
        self._indexes = live.readable, (history or nothing).readable
        self._max_draft = drafting.max_draft
        self._is_tree = drafting.shape == "tree"
        self._weights, self._rates = _weights(), rates
        self._stops = np.array(sorted(stop_ids), np.int32)
        self._free = list(range(max_sequences))[::-1]
        n, places, width = max_sequences, kernels.PLACES, drafting.max_draft
        # Shapes and types are those at the fields of these classes, in their order.
        self._contexts = Contexts(
            *_zeros((n, kernels.MEMORY), "i4"), *_zeros(n, "i8 i8 i8 i8 i8 u8")
        )
        self._candidates = Candidates(
            *_zeros((n, places), "i8 i4 i4 i4 f4"), *_zeros(n, "i8 i8 i8 i8")
        )
        self._texts = Texts(*_zeros((n, places, width), "i4"), *_zeros((n, places), "i4 i4 i4 f4"))
        self._work = kernels.Work(
            *_zeros((n, kernels.NUM_LEVELS), "u8"), *_zeros(n, "i8 i8 i8 i8 i8")
        )
        nodes = build_draft.BRANCHES * (width + 1)
        self._frontier = build_draft.Frontier(*_zeros(nodes, "i4 i4 i8 i4 u8 f4"))
        self._ballot = build_draft.Ballot(*_zeros(places, "f4 i4 f4 f4 u8 i8 i8"))

    def begin(
        self, prompt_ids: Sequence[int], tokens: Sequence[int], *, sample: int, noise_epoch: int
    ) -> int:
        """Add a sequence whose response has `tokens` so far. Returns a handle: a small number,
        reused after `end`."""
        handle = self._free.pop()
        key = prompt_key(prompt_ids)
        recent = np.array([*prompt_ids[-kernels.MEMORY :], *tokens[-kernels.MEMORY :]], np.int32)
        contexts = self._contexts
        contexts.known[handle] = 0
        contexts.prompt[handle] = key
        contexts.sample[handle] = sample
        contexts.noise[handle] = noise_epoch
        contexts.itself[handle] = kernels.itself(key, sample, noise_epoch)
        kernels.remember(contexts, np.array([handle]), recent, np.array([0, len(recent)]))
        contexts.length[handle] = len(tokens)
        candidates = self._candidates
        candidates.at[handle] = 0
        candidates.found[handle] = 0
        candidates.needed[handle] = 1
        candidates.seen[handle] = len(tokens)
        candidates.kinds[handle, kernels.FOUND :] = kernels.KIND_ALIGNED
        candidates.merits[handle, kernels.FOUND :] = 1.0
        if noise_epoch >= 0:
            self._align(handle, len(tokens))
        return handle

    def _align(self, handle: int, length: int) -> None:
        """Add aligned candidates: the same length in responses of this prompt, sample and noise."""
        contexts, candidates = self._contexts, self._candidates
        place = kernels.FOUND
        for source, arrays in enumerate(self._indexes):
            at = candidates.at[handle, place:]
            key = contexts.prompt[handle], contexts.sample[handle], contexts.noise[handle]
            count = kernels.align(arrays, *key, length, at)
            candidates.sources[handle, place : place + count] = source
            place += count

    def end(self, handle: int) -> None:
        """Forget a sequence."""
        self._free.append(handle)

    def extend(self, handles: np.ndarray, tokens: np.ndarray, offsets: np.ndarray) -> None:
        """Add tokens[offsets[i]:offsets[i + 1]] (int32) of handles[i] (int64), for all i."""
        kernels.remember(self._contexts, handles, tokens, offsets)

    def propose(self, handles: np.ndarray, most: np.ndarray, states: np.ndarray) -> Proposals:
        """Draft at most most[i] and `max_draft` tokens for handles[i], for all i. `states`: of the
        sequences, see `control`. All three are int64 [n]. The result is newly allocated. Sequences
        with most[i] = 0 cost nothing."""
        n, width = len(handles), self._max_draft
        proposals = Proposals(
            np.empty((n, width), np.int32),
            np.empty((n, width), np.int32),
            np.empty((n, width), np.float32),
            np.empty((n, width), np.int32),
            np.zeros(n, np.int64),
        )
        texts = self._texts
        kernels.collect(
            *self._indexes, self._contexts, self._candidates, handles, most, self._stops, texts,
            self._work,
        )  # fmt: skip
        build_draft.build_drafts(
            texts, states, most, self._weights, self._rates, self._is_tree,
            proposals, self._frontier, self._ballot,
        )  # fmt: skip
        return proposals


def _weights() -> np.ndarray:
    """Return the votes by origin and matched length, float32 [NUM_KINDS, LONGEST_MATCH + 1]. They
    double for every 1.5 matched tokens, up to 16 tokens, and are higher for text of the same prompt
    (chosen by replay of recorded rollouts, `benchmarks/drafter.py`)."""
    matched = np.minimum(np.arange(kernels.LONGEST_MATCH + 1), 16)
    return np.outer(_NEARNESS, 2.0 ** (matched / 1.5)).astype(np.float32)


def _zeros(shape: int | tuple[int, ...], types: str) -> Iterator[np.ndarray]:
    """Yield an array of zeros of this shape for each NumPy type in `types`."""
    return (np.zeros(shape, each) for each in types.split())
