"""The drafter: its statistics, against a real index; its decisions, in virtual time."""

import msgspec
import numpy as np
import pytest

from rhymeflow.config import DraftingConfig
from rhymeflow.histospec.draft import NONE
from rhymeflow.histospec.drafter import Drafter
from rhymeflow.histospec.index import Index
from tests.histospec.fakes import World, run

PROMPT = [7, 8, 9]
TEXT = [int(t) for t in np.random.default_rng(0).integers(10, 60, 80)]


def history_of(*texts: list[int]) -> Index:
    index = Index(max_tokens=2000, max_responses=10)
    for sample, text in enumerate(texts):
        response = index.begin(PROMPT, sample=sample, noise_epoch=0)
        index.extend(response, text)
        index.finish(response, 1.0)
    return index


def make(history: Index | None, window: str = "aimd", **more) -> Drafter:
    ticks = iter(range(10**9))
    how = {"max_sequences": 4, "max_length": 200, "clock": lambda: next(ticks) * 1e-6} | more
    return Drafter(history, DraftingConfig(window=window, max_draft=8), **how)


def follow(drafter: Drafter, handle: int, text: list[int], done: int, iterations: int) -> int:
    """Decode `text` from `done` on; return how far it came. An iteration takes 5 ms."""
    for _ in range(iterations):
        (draft,) = drafter.propose([handle], [len(text) - done - 1], other_rows=0, kv_tokens=done)
        size = 0
        while size < len(draft.tokens) and draft.tokens[size] == text[done + size]:
            size += 1
        made = text[done : done + size + 1]
        rows = 1 + len(draft.tokens)
        drafter.observe([handle], [made], rows=rows, kv_tokens=done, seconds=0.005)
        done += len(made)
    return done


def test_what_history_says_is_drafted_and_counted():
    drafter = make(history_of(TEXT))
    handle = drafter.begin(PROMPT, [], sample=0, noise_epoch=0)
    done = follow(drafter, handle, TEXT, 0, 10)
    stats = drafter.stats
    assert done == stats.generated > 40
    assert stats.steps == 10
    assert stats.accepted == stats.generated - stats.steps
    assert stats.drafted >= stats.accepted
    assert 0 < stats.seconds < 0.001
    assert stats.saved_seconds > 0.1
    assert msgspec.msgpack.encode(stats), "messages carry it"


def test_a_sibling_that_runs_is_drafted_from():
    drafter = make(None)
    first = drafter.begin(PROMPT, [], sample=0, noise_epoch=0)
    follow(drafter, first, TEXT, 0, 40)
    assert drafter.stats.accepted == 0
    second = drafter.begin(PROMPT, [], sample=1, noise_epoch=0)
    assert follow(drafter, second, TEXT, 0, 12) > 20


def test_a_response_that_was_interrupted_goes_on():
    drafter = make(history_of(TEXT))
    handle = drafter.begin(PROMPT, [], sample=0, noise_epoch=0)
    done = follow(drafter, handle, TEXT, 0, 3)
    drafter.end(handle)
    handle = drafter.begin(PROMPT, TEXT[:done], sample=0, noise_epoch=0)
    assert follow(drafter, handle, TEXT, done, 3) > done + 6


def test_room_is_kept_to_and_others_may_be_told_of_in_any_order():
    drafter = make(history_of(TEXT))
    a, b, c = (drafter.begin(PROMPT, TEXT[:5], sample=i, noise_epoch=0) for i in range(3))
    assert drafter.propose([a], [0], other_rows=0, kv_tokens=0) == [NONE]
    assert drafter.propose([a], [1], other_rows=0, kv_tokens=0) == [(TEXT[5:6], [-1])]
    drafts = drafter.propose([a, b], [8, 8], other_rows=20, kv_tokens=0)
    assert [len(draft.tokens) for draft in drafts] == [2, 2]
    made = [[0], TEXT[5:8], [0]]
    drafter.observe([c, b, a], made, rows=26, kv_tokens=0, seconds=0.005)
    assert (drafter.stats.accepted, drafter.stats.generated) == (2, 5)
    drafter.observe([c], [[1]], rows=30, kv_tokens=0, seconds=0.005)
    assert drafter.stats.steps == 4


CURVES = {
    "overhead": lambda rows: 3e-3 + 1e-5 * rows,
    "memory": lambda rows: 1e-2 + 4e-5 * max(0, rows - 256),
    "steps": lambda rows: 2e-3 + 1.5e-3 * -(-rows // 16),
    "half": lambda rows: 1e-2 + 1e-3 * rows,
    "proportional": lambda rows: 5e-4 + 1e-3 * rows,
}
CHANCES = {"none": [0.0], "most": [0.9], "mixed": [0.0, 0.1, 0.5, 0.95]}
LENGTHS = {1: 2000, 32: 1000, 256: 450}


def throughput(window: str, curve: str, chances: str, batch: int, monkeypatch) -> float:
    """Against no drafts, the drafter's own time included."""
    world = World(lambda now: CHANCES[chances], CURVES[curve], lambda n: 5e-5 + 3e-6 * n)
    run(world, window, [LENGTHS[batch]] * batch, monkeypatch=monkeypatch)
    return world.plain / world.fair


@pytest.mark.parametrize("batch", LENGTHS)
@pytest.mark.parametrize("curve", CURVES)
def test_cost_never_loses_and_is_as_good_as_the_published_rule(curve, batch, monkeypatch):
    for chances in CHANCES:
        cost = throughput("cost", curve, chances, batch, monkeypatch)
        assert cost >= 0.97, chances
        if batch in (1, 32):
            aimd = throughput("aimd", curve, chances, batch, monkeypatch)
            assert cost >= 0.97 * aimd, chances


def test_what_begins_to_pay_is_noticed(monkeypatch):
    """Proposals are worthless for 2 s and good from then on, without any sign of it."""
    world = World(lambda now: [0.0] if now < 2 else [0.9], CURVES["overhead"], lambda n: 1e-4)
    drafter = run(world, "cost", [1500] * 8, monkeypatch=monkeypatch)
    # About 600 tokens each in the first 2 s; the other 900 in a fraction of as many iterations.
    assert drafter.stats.steps / 8 < 600 + 300


def test_stragglers_are_drafted_for_though_the_batch_is_not(monkeypatch):
    lengths = [60] * 60 + [600] * 4
    world = World(
        lambda now: [0.6], lambda rows: 5e-4 + 5e-4 * max(16, rows), lambda n: 1e-4 + 1e-5 * n
    )
    drafter = run(world, "cost", lengths, monkeypatch=monkeypatch)
    assert drafter.stats.generated - drafter.stats.steps > 0.4 * 4 * 540


def test_what_is_said_to_be_saved_is_what_is_saved(monkeypatch):
    world = World(lambda now: [0.7], CURVES["overhead"], lambda n: 5e-4, noise=0.02)
    drafter = run(world, "cost", [800] * 8, monkeypatch=monkeypatch)
    assert drafter.stats.saved_seconds == pytest.approx(world.plain - world.now, rel=0.1)


def short_answers(
    curve, chances: list[float], batch: int, seed: int, monkeypatch, prompt_row: float = 6e-4
) -> World:
    """Some hundred iterations of a new engine, most of which take in prompts as well."""
    world = World(lambda now: chances, curve, lambda n: 5e-5 + 7e-6 * n, noise=0.12)
    world.random = np.random.default_rng(seed)
    sizes = {"batch": batch, "prompt": 16, "prompt_row": prompt_row}
    run(world, "cost", [8] * 25 * batch, **sizes, monkeypatch=monkeypatch)
    return world


@pytest.mark.parametrize("batch", [8, 32, 64])
@pytest.mark.parametrize("chances", [[0.3], [0.0, 0.5, 0.9]])
def test_short_answers_lose_nothing_where_a_row_costs_as_much_as_a_token(
    chances, batch, monkeypatch
):
    for seed in range(3):
        world = short_answers(lambda rows: 2e-4 + 1.2e-3 * rows, chances, batch, seed, monkeypatch)
        assert world.searches > 0
        assert world.plain / world.fair > 0.97


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_short_answers_are_drafted_where_rows_are_cheap(batch, monkeypatch):
    for seed in range(3):
        world = short_answers(
            lambda rows: 2e-2 + 1e-4 * rows, [0.8], batch, seed, monkeypatch, prompt_row=5e-5
        )
        assert world.plain / world.fair > 1.3
