"""The search against a slow and direct one, over histories in which matches abound."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.config import DraftingConfig
from rhymeflow.histospec import build_draft, index
from rhymeflow.histospec.search import Search
from tests.histospec import oracle

PROMPTS = [[7, 8, 1, 2, 1], [7, 8, 9], [2, 2, 1, 2, 1]]
RATES = np.random.default_rng(0).uniform(0.05, 0.95, build_draft.NUM_CLASSES).astype(np.float32)


@pytest.fixture(autouse=True, scope="module")
def no_collisions():
    """Few suffixes share a chain: who looks at twelve places of one finds less for each, and the
    oracle knows no such thing."""
    sizes = index._sizes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "_sizes", lambda *given: (sizes(*given)[0], 2**18))
        yield


tokens = st.lists(st.integers(1, 3), max_size=40)
response = st.tuples(
    st.integers(0, 2),  # prompt
    st.integers(0, 1),  # sample
    st.integers(-1, 1),  # noise epoch
    tokens,
    st.sampled_from([None, 0.0, 0.5, 1.0]),
    st.booleans(),  # finished
)


def filled(responses) -> oracle.Recorded:
    """Responses that grow at the same time, seven tokens at a time."""
    made = oracle.Recorded()
    numbers = [
        made.begin(PROMPTS[prompt], sample=sample, noise_epoch=noise_epoch)
        for prompt, sample, noise_epoch, *_ in responses
    ]
    for start in range(0, 40, 7):
        for number, (_, _, _, text, *_) in zip(numbers, responses, strict=True):
            made.extend(number, text[start : start + 7])
    for number, (*_, reward, is_finished) in zip(numbers, responses, strict=True):
        if is_finished:
            made.finish(number, reward)
    return made


def search_of(live, history=None, stops=(), **drafting):
    how = {"max_sequences": 40, "rates": RATES, "stop_ids": stops}
    return Search(live, history, DraftingConfig(**drafting), **how)


def flat(lists):
    offsets = np.cumsum([0, *map(len, lists)])
    return np.array([token for tokens in lists for token in tokens], np.int32), offsets


def nodes_of(proposals, row):
    rows = (array[row, : proposals.counts[row]].tolist() for array in proposals[:4])
    return list(zip(*rows, strict=True))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(response, max_size=8),
    st.lists(response, max_size=4),
    st.lists(st.tuples(response, st.lists(st.integers(0, 5), max_size=8)), min_size=1, max_size=3),
    st.booleans(),
    st.sampled_from([(), (3,), (1, 3)]),
)
def test_drafts_are_those_of_the_direct_search(earlier, live, running, is_tree, stops):
    indexes = filled(live), filled(earlier)
    shape = "tree" if is_tree else "linear"
    search = search_of(*indexes, stops, max_draft=8, shape=shape)
    handles, slow, numbers = [], [], []
    for (prompt, sample, noise_epoch, *_), _ in running:
        how = {"sample": sample, "noise_epoch": noise_epoch}
        handles.append(search.begin(PROMPTS[prompt], [], **how))
        slow.append(oracle.Sequence(indexes, PROMPTS[prompt], **how))
        numbers.append(indexes[0].begin(PROMPTS[prompt], **how))
    done = [0] * len(running)
    for step in range(8):
        most = np.array([(step + i) % 9 for i in range(len(running))])
        states = np.array([(step + i) % build_draft.NUM_STATES for i in range(len(running))])
        proposals = search.propose(np.array(handles), most, states)
        for row, sequence in enumerate(slow):
            if most[row] == 0:
                assert proposals.counts[row] == 0
                continue
            how = {"state": states[row], "is_tree": is_tree, "rates": RATES, "stops": stops}
            expected = oracle.draft(sequence, most[row], **how)
            assert nodes_of(proposals, row) == [(t, p, float(r), c) for t, p, r, c in expected]
        made = []
        for i, (one, lengths) in enumerate(running):
            length = lengths[step] if step < len(lengths) else 1
            made.append(one[3][done[i] : done[i] + length])
            done[i] += length
            slow[i].extend(made[-1])
            indexes[0].extend(numbers[i], made[-1])
        search.extend(np.array(handles), *flat(made))


def test_handles_are_small_and_used_again():
    search = search_of(filled([]))
    how = {"sample": 0, "noise_epoch": -1}
    handles = [search.begin([1], [], **how) for _ in range(40)]
    assert handles == list(range(40))
    search.end(handles[3])
    assert search.begin([1], [], **how) == 3


def test_classes_are_all_there_once():
    shares = (np.arange(build_draft.NUM_SHARES) + 0.5) / build_draft.NUM_SHARES
    every = itertools.product(shares, range(build_draft.NUM_STATES), range(build_draft.NUM_KINDS))
    assert [build_draft.class_of(*one) for one in every] == list(range(build_draft.NUM_CLASSES))
