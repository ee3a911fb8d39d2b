"""A fake engine and a fake search in virtual time, for tests of the drafter's decisions.

The search finds what it is told to find: each sequence's proposal lies in one class, and each of
its tokens is right with that class's chance. The engine takes as long as a formula says, with
noise."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rhymeflow.config import DraftingConfig
from rhymeflow.histospec import build_draft, drafter
from rhymeflow.histospec.search import Proposals


@dataclass
class World:
    """What is true, and the time it is."""

    chance: Callable[[float], Sequence[float]]
    """At a time: what the acceptances of proposals are drawn from."""
    iteration: Callable[[int], float]  # seconds by rows
    search: Callable[[int], float]  # seconds by sequences
    noise: float = 0.05
    now: float = 0.0
    fair: float = 0.0  # the same without noise: what a run is judged by
    plain: float = 0.0
    """What the same tokens would have taken without drafts, in the batches they came in."""
    searches: int = 0
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))


class FakeSearch:
    """In place of `histospec.search.Search`."""

    def __init__(self, world: World, *, max_draft: int, rates: np.ndarray) -> None:
        self.world, self.max_draft, self.rates = world, max_draft, rates
        self.text: dict[int, int] = {}
        """By handle the length of the response; its token at place t is t."""

    def begin(self, prompt_ids, tokens, *, sample, noise_epoch) -> int:
        handle = next(h for h in range(len(self.text) + 1) if h not in self.text)
        self.text[handle] = len(tokens)
        return handle

    def end(self, handle: int) -> None:
        del self.text[handle]

    def extend(self, handles, tokens, offsets) -> None:
        for handle, size in zip(handles.tolist(), np.diff(offsets).tolist(), strict=True):
            self.text[handle] += size

    def propose(self, handles, most, states) -> Proposals:
        world, n, width = self.world, len(handles), self.max_draft
        world.searches += 1
        world.now += world.search(n)
        world.fair += world.search(n)
        place = np.array([self.text[handle] for handle in handles.tolist()])[:, None]
        # Which share of the votes stands for which chance is fixed.
        options = np.array(world.chance(world.now))
        which = world.random.integers(len(options), size=n)
        chance = options[which][:, None]
        shares = (which + 3.5) / build_draft.NUM_SHARES
        classes = np.array(
            [[build_draft.class_of(*one)] for one in zip(shares, states, itertools.repeat(1))]
        )
        right = world.random.random((n, width)) < chance
        counts = np.minimum(np.where(most > 0, width, 0), most)
        return Proposals(
            np.where(right, place + np.arange(width), -1).astype(np.int32),
            np.tile(np.arange(-1, width - 1, dtype=np.int32), (n, 1)),
            np.cumprod(np.repeat(self.rates[classes], width, 1), 1).astype(np.float32),
            np.repeat(classes, width, 1).astype(np.int32),
            counts.astype(np.int64),
        )


def run(
    world: World, window: str, lengths: Sequence[int], *, batch: int | None = None,
    prompt: int = 0, prompt_row: float = 0.0, monkeypatch,
) -> drafter.Drafter:  # fmt: skip
    """Decode responses of these lengths, up to `batch` or all at once; `world.now` is what it took.
    Whoever ends is followed by a prompt to take in: `prompt` rows, of `prompt_row` seconds each."""

    def search(live, history, drafting, *, max_sequences, rates, stop_ids) -> FakeSearch:
        return FakeSearch(world, max_draft=drafting.max_draft, rates=rates)

    monkeypatch.setattr(drafter, "Search", search)
    batch = batch or len(lengths)
    sizes = {"max_sequences": batch, "max_length": 4}
    it = drafter.Drafter(None, DraftingConfig(window=window), **sizes, clock=lambda: world.now)
    left: dict[int, int] = {}
    done: dict[int, int] = {}
    coming = list(enumerate(lengths))
    while coming or left:
        new, coming = coming[: batch - len(left)], coming[batch - len(left) :]
        if left or prompt:
            iterate(world, it, left, done, other=len(new) * prompt, prompt_row=prompt_row)
        for index, length in new:
            handle = it.begin([index], [], sample=index, noise_epoch=0)
            left[handle], done[handle] = length, 0
    return it


def iterate(
    world: World, it: drafter.Drafter, left: dict[int, int], done: dict[int, int], *,
    other: int, prompt_row: float,
) -> None:  # fmt: skip
    """One iteration of those that are left, and of `other` rows of prompts."""
    handles = list(left)
    kv_tokens = sum(done[handle] for handle in handles)
    room = [left[handle] - 1 for handle in handles]
    drafts = it.propose(handles, room, other_rows=other, kv_tokens=kv_tokens) if handles else []
    generated = []  # what an engine makes of drafts: a response is 0, 1, 2, ...
    for handle, draft in zip(handles, drafts, strict=True):
        size = 0
        while size < len(draft.tokens) and draft.tokens[size] == done[handle] + size:
            size += 1
        generated.append(list(range(done[handle], done[handle] + size + 1)))
    rows = len(handles) + sum(len(draft.tokens) for draft in drafts)
    true = world.iteration(rows) + other * prompt_row
    held_up = 8 if world.random.random() < 0.01 else 1
    seconds = true * held_up * (1 + world.noise * world.random.standard_normal())
    world.now += seconds
    world.fair += true
    world.plain += other * prompt_row
    if handles:
        world.plain += world.iteration(len(handles)) * sum(map(len, generated)) / len(handles)
        it.observe(handles, generated, rows=rows + other, kv_tokens=kv_tokens, seconds=seconds)
    else:
        world.plain += world.iteration(0)
    for handle, tokens in zip(handles, generated, strict=True):
        done[handle] += len(tokens)
        left[handle] -= len(tokens)
        if not left[handle]:
            del left[handle]
            it.end(handle)
