"""The search against a slow and direct one, over histories in which matches abound."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.histospec import build_draft, control, kernels, storage
from rhymeflow.histospec.index import Index, prompt_key
from rhymeflow.histospec.search import Search
from tests.histospec import oracle

PROMPTS = [[7, 8, 1, 2, 1], [7, 8, 9], [2, 2, 1, 2, 1]]
RATES = np.random.default_rng(0).uniform(0.05, 0.95, build_draft.NUM_CLASSES).astype(np.float32)
# The more agree the better, and what is aligned best of all.
SHAPE = (build_draft.NUM_SHARES, build_draft.NUM_STATES, build_draft.NUM_KINDS)
AGREED = (np.indices(SHAPE)[0] + 1) / (build_draft.NUM_SHARES + 2)
AGREED[:, :, kernels.KIND_ALIGNED] += 0.1
AGREED = AGREED.ravel().astype(np.float32)
FIRST = np.array([control.BEGUN])
RANKINGS = ("reward", "frequency", "combined")


@pytest.fixture(autouse=True, scope="module")
def no_collisions():
    """Few suffixes share a chain: who looks at twelve places of one finds less for each, and the
    oracle knows no such thing.
    """
    sizes = storage.sizes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "sizes", lambda *given: (sizes(*given)[0], 2**18))
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


class Pair:
    """An index and the oracle's, told the same."""

    def __init__(self, max_tokens: int) -> None:
        self.index = Index(max_tokens=max_tokens, max_responses=64)
        num_blocks = len(self.index.readable.words) // kernels.BLOCK_WORDS
        self.history = oracle.History(num_blocks)

    def begin(self, prompt: int, sample: int, noise_epoch: int) -> tuple[int, int]:
        ids = PROMPTS[prompt]
        key = prompt_key(ids)
        how = {"sample": sample, "noise_epoch": noise_epoch}
        number = self.index.begin(key, ids, **how)
        return number, self.history.begin(key, ids, **how)

    def extend(self, number: tuple[int, int], tokens: list[int]) -> None:
        self.index.extend(number[0], tokens)
        self.history.extend(number[1], tokens)

    def finish(self, number: tuple[int, int], reward: float | None) -> None:
        self.index.finish(number[0], reward)
        self.history.finish(number[1], reward)

    def fill(self, responses) -> None:
        """Responses that grow at the same time, seven tokens at a time."""
        numbers = [self.begin(*one[:3]) for one in responses]
        for start in range(0, 40, 7):
            for number, one in zip(numbers, responses, strict=True):
                self.extend(number, one[3][start : start + 7])
        for number, (*_, reward, is_finished) in zip(numbers, responses, strict=True):
            if is_finished:
                self.finish(number, reward)


def search_of(pairs, ranking="combined", shape="linear", max_draft=8, rates=RATES):
    return Search(
        [pair.index for pair in pairs],
        max_draft=max_draft,
        shape=shape,
        ranking=ranking,
        rates=rates,
    )


def flat(lists):
    offsets = np.cumsum([0, *map(len, lists)])
    return np.array([token for tokens in lists for token in tokens], np.int32), offsets


def check(proposals, row, expected):
    count = proposals.counts[row]
    got = list(
        zip(
            proposals.tokens[row, :count].tolist(),
            proposals.parents[row, :count].tolist(),
            proposals.path_probability[row, :count].tolist(),
            proposals.classes[row, :count].tolist(),
            strict=True,
        )
    )
    assert got == [(t, p, float(r), c) for t, p, r, c in expected]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(response, max_size=8),
    st.lists(response, max_size=4),
    st.lists(st.tuples(response, st.lists(st.integers(0, 5), max_size=8)), min_size=1, max_size=3),
    st.sampled_from(RANKINGS),
    st.sampled_from([4000, 60]),
)
def test_linear_drafts_are_those_of_the_direct_search(earlier, live, running, ranking, max_tokens):
    pairs = [Pair(max_tokens), Pair(max_tokens)]
    pairs[0].fill(live)
    pairs[1].fill(earlier)
    search = search_of(pairs, ranking)
    handles, slow, numbers = [], [], []
    for (prompt, sample, noise_epoch, *_), _ in running:
        # An aligned text that is overwritten while it is used is not modelled.
        how = {"sample": sample, "noise_epoch": noise_epoch if max_tokens > 1000 else -1}
        handles.append(search.begin(PROMPTS[prompt], [], **how))
        key = prompt_key(PROMPTS[prompt])
        histories = [pair.history for pair in pairs]
        slow.append(oracle.Sequence(histories, key, PROMPTS[prompt], [], **how))
        numbers.append(pairs[0].begin(prompt, sample, noise_epoch))
    done = [0] * len(running)
    for step in range(8):
        most = np.array([(step + i) % 9 for i in range(len(running))])
        states = np.array([(step + i) % build_draft.NUM_STATES for i in range(len(running))])
        proposals = search.propose(np.array(handles), most, states)
        for row, sequence in enumerate(slow):
            if most[row] == 0:
                assert proposals.counts[row] == 0
                continue
            expected = oracle.draft(
                sequence, most[row], state=states[row], ranking=ranking, is_tree=False, rates=RATES
            )
            check(proposals, row, expected)
        made = []
        for i, (one, lengths) in enumerate(running):
            length = lengths[step] if step < len(lengths) else 1
            made.append(one[3][done[i] : done[i] + length])
            done[i] += length
            slow[i].extend(made[-1])
            pairs[0].extend(numbers[i], made[-1])
        search.extend(np.array(handles), *flat(made))


@settings(max_examples=80, deadline=None)
@given(st.lists(response, max_size=8), response, st.sampled_from(RANKINGS), st.integers(1, 12))
def test_trees_hold_the_likeliest_nodes(earlier, one, ranking, most):
    pair = Pair(4000)
    pair.fill(earlier)
    search = search_of([pair], ranking, "tree", max_draft=12)
    prompt, sample, noise_epoch, text, *_ = one
    how = {"sample": sample, "noise_epoch": noise_epoch}
    handle = search.begin(PROMPTS[prompt], text, **how)
    proposals = search.propose(np.array([handle]), np.array([most]), np.array([2]))
    key = prompt_key(PROMPTS[prompt])
    slow = oracle.Sequence([pair.history], key, PROMPTS[prompt], text, **how)
    expected = oracle.draft(slow, most, state=2, ranking=ranking, is_tree=True, rates=RATES)
    count = proposals.counts[0]
    # Which of two equally likely nodes comes first is left open; the probabilities are not.
    assert proposals.path_probability[0, :count].tolist() == [float(node[2]) for node in expected]
    parents = proposals.parents[0, :count]
    assert all(-1 <= parent < node for node, parent in enumerate(parents))
    siblings = list(zip(parents.tolist(), proposals.tokens[0, :count].tolist(), strict=True))
    assert len(set(siblings)) == len(siblings), "a continuation stands once"


def test_the_first_token_is_drafted_from_the_end_of_the_prompt():
    pair = Pair(1000)
    number = pair.begin(0, 0, -1)
    pair.extend(number, [5, 6, 4, 3])
    search = search_of([pair])
    handle = search.begin(PROMPTS[0], [], sample=1, noise_epoch=-1)
    proposals = search.propose(np.array([handle]), np.array([3]), FIRST)
    assert proposals.tokens[0, :3].tolist() == [5, 6, 4]
    assert proposals.parents[0, :3].tolist() == [-1, 0, 1]


@pytest.mark.parametrize(("noise_epoch", "drafted"), [(0, 1), (3, 2)])
def test_equal_noise_says_what_comes_where_the_texts_before_say_nothing(noise_epoch, drafted):
    pair = Pair(1000)
    for sample, first in [(0, 1), (1, 2), (2, 2)]:
        number = pair.begin(1, sample, 0)
        pair.extend(number, [first, 3, 3])
        pair.finish(number, None)
    search = search_of([pair], rates=AGREED)
    handle = search.begin(PROMPTS[1], [], sample=0, noise_epoch=noise_epoch)
    proposals = search.propose(np.array([handle]), np.array([1]), FIRST)
    assert proposals.tokens[0, 0] == drafted


def test_the_better_rewarded_continuation_is_drafted_if_rewards_rank():
    drafted = {}
    for ranking in RANKINGS:
        pair = Pair(1000)
        for sample, (first, reward) in enumerate([(1, 0.0), (1, 0.0), (2, 1.0)]):
            number = pair.begin(1, sample, -1)
            pair.extend(number, [first, 3])
            pair.finish(number, reward)
        search = search_of([pair], ranking, rates=AGREED)
        handle = search.begin(PROMPTS[1], [], sample=9, noise_epoch=-1)
        drafted[ranking] = search.propose(np.array([handle]), np.array([1]), FIRST).tokens[0, 0]
    assert drafted == {"reward": 2, "frequency": 1, "combined": 2}


def test_handles_are_small_and_used_again():
    search = search_of([Pair(1000)])
    how = {"sample": 0, "noise_epoch": -1}
    handles = [search.begin([1], [], **how) for _ in range(40)]
    assert handles == list(range(40))
    search.end(handles[3])
    assert search.begin([1], [], **how) == 3


def test_without_an_index_nothing_is_drafted():
    search = Search([], max_draft=4, shape="linear", ranking="combined", rates=RATES)
    handle = search.begin([1, 2], [3], sample=0, noise_epoch=-1)
    assert search.propose(np.array([handle]), np.array([4]), FIRST).counts.tolist() == [0]


def test_classes_are_all_there_once():
    shares = (np.arange(build_draft.NUM_SHARES) + 0.5) / build_draft.NUM_SHARES
    every = itertools.product(shares, range(build_draft.NUM_STATES), range(build_draft.NUM_KINDS))
    assert [build_draft.class_of(*one) for one in every] == list(range(build_draft.NUM_CLASSES))
