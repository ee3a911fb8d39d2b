"""Drafts for vLLM's second runner, in a request state like its own; vLLM is not needed."""

from types import SimpleNamespace

import torch

from rhymeflow.engine.vllm.speculator import NoSpeculation, put_drafts
from rhymeflow.engine.vllm.worker import WorkerExtension

NUM_SLOTS, NUM_TOKENS = 5, 4


def states(**slots):
    tokens = torch.full((NUM_SLOTS, NUM_TOKENS), 99)
    return SimpleNamespace(draft_tokens=tokens, req_id_to_index=slots)


def test_drafts_are_put_in_the_slots_of_their_requests():
    found = states(a=3, b=0, c=1)
    put_drafts(found, {"b": [7, 8, 9], "a": [5]})
    assert found.draft_tokens[0, :3].tolist() == [7, 8, 9]
    assert found.draft_tokens[3, 0].item() == 5
    for slot in (1, 2, 4):
        assert (found.draft_tokens[slot] == 99).all()


def test_the_longest_draft_fills_its_row():
    found = states(a=3)
    put_drafts(found, {"a": [1, 2, 3, 4]})
    assert found.draft_tokens[3].tolist() == [1, 2, 3, 4]


def test_no_drafts_change_nothing():
    found = states(a=3)
    put_drafts(found, {})
    assert (found.draft_tokens == 99).all()


def test_what_the_speculator_proposes_has_a_row_for_each_request():
    worker = WorkerExtension()
    worker.model_runner = SimpleNamespace(req_states=states(a=3), speculator=None)
    worker.rhymeflow_speculate()
    speculator = worker.model_runner.speculator
    assert isinstance(speculator, NoSpeculation)
    batch = SimpleNamespace(num_reqs=2)
    assert speculator.propose(batch, None, num_speculative_tokens=2).shape == (2, NUM_TOKENS)
    worker.rhymeflow_draft({"a": [6]})
    assert worker.model_runner.req_states.draft_tokens[3, 0].item() == 6
