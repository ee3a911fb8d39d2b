"""Drafts handed to an engine: whose they are, and what the drafter hears."""

import pytest

from rhymeflow.engine.base import NoiseKey, Request, Sampling
from rhymeflow.engine.drafter import Drafting
from rhymeflow.histospec.draft import NONE, Draft


class Recorder:
    """Drafts the member's number, again and again, and records what it is told."""

    def __init__(self):
        self.live, self.begun, self.observed = {}, [], []

    def begin(self, prompt_ids, tokens, *, sample, noise_epoch):
        handle = next(i for i in range(99) if i not in self.live)
        self.live[handle] = sample
        self.begun.append((tuple(prompt_ids), list(tokens), sample, noise_epoch))
        return handle

    def end(self, handle):
        del self.live[handle]

    def propose(self, handles, max_tokens, *, other_rows, kv_tokens):
        self.asked = (list(handles), list(max_tokens), other_rows, kv_tokens)
        drafts = [Draft([self.live[handle]] * 4, [-1, 0, 1, 2]) for handle in handles]
        return [
            draft if self.live[handle] else NONE
            for handle, draft in zip(handles, drafts, strict=True)
        ]

    def observe(self, handles, generated, **counts):
        assert all(handle in self.live for handle in handles)
        self.observed.append((list(handles), generated, counts))


def request(number, tokens=()):
    how = Sampling(1.0, 1.0, 0, 20, frozenset())
    return Request(f"r{number}", [1, 2], NoiseKey(7, 3, number), how, list(tokens))


@pytest.fixture
def drafting():
    made = Drafting(vocabulary=100, max_sequences=3)
    made.use(Recorder())
    return made


def test_drafts_are_those_of_the_request(drafting):
    requests = [request(0), request(5, [9, 9]), request(6)]
    found = drafting.propose(requests, other_rows=11, kv_tokens=40)
    assert {key: draft.tokens for key, draft in found.items()} == {"r5": [5] * 4, "r6": [6] * 4}
    assert drafting.drafter.begun[1] == ((1, 2), [9, 9], 5, 3)
    assert drafting.drafter.asked[1:] == ([19, 17, 19], 11, 40)


def test_the_drafter_hears_what_came_of_it_and_what_else_was_run(drafting):
    drafting.propose([request(1), request(2)], other_rows=50, kv_tokens=40)
    drafting.observe(
        # r1 had two drafted tokens run, r2 was preempted, r3 ended its prefill of 30.
        {"r1": [1, 1, 8], "r3": [4]},
        {"r1": 2, "r3": 0},
        rows=33,
        seconds=0.5,
    )
    ((handles, generated, counts),) = drafting.drafter.observed
    assert (handles, generated) == ([0], [[1, 1, 8]])
    assert counts == {"rows": 33, "kv_tokens": 40, "seconds": 0.5, "other_rows": 30}


def test_nothing_is_observed_where_nothing_decoded(drafting):
    assert drafting.propose([], other_rows=9, kv_tokens=0) == {}
    drafting.observe({"r1": [4]}, {"r1": 0}, rows=9, seconds=0.5)
    assert drafting.drafter.observed == []


def test_the_place_of_one_that_was_preempted_goes_to_another(drafting):
    drafting.propose([request(1), request(2), request(3)], other_rows=0, kv_tokens=0)
    drafting.propose([request(2), request(3), request(4)], other_rows=0, kv_tokens=0)
    assert sorted(drafting.drafter.live.values()) == [2, 3, 4]
    drafting.propose([request(1), request(2)], other_rows=0, kv_tokens=0)
    assert len(drafting.drafter.live) == 3
    drafting.end(["r1", "r2", "r3", "r4", "r9"])
    assert drafting.drafter.live == {}
