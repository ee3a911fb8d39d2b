from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.learner.minibatch import cut, pack_for_rank
from rhymeflow.learner.packing import pack
from rhymeflow.learner.sample import Sample
from tests.learner.builders import made_up_batch

TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=12)
# Of two tokens, so that many begin alike.
RESPONSES = st.lists(st.integers(0, 1), min_size=1, max_size=12)


def _sample(prompt: list[int], response: list[int]) -> Sample:
    n = len(response)
    return Sample(0, prompt, response, [0.0] * n, [0] * n, 0.0, False)


# Few prompts, so that neighbours often share one.
SAMPLES = st.lists(
    st.builds(_sample, st.sampled_from([[1], [1, 2], [3, 1, 2]]) | TOKENS, RESPONSES), max_size=20
)


@given(samples=SAMPLES, max_tokens=st.integers(1, 60))
def test_every_sample_once_whole_and_within_the_budget(samples, max_tokens):
    rows = pack(samples, range(len(samples)), max_tokens)
    assert [i for row in rows for i in row.members] == list(range(len(samples)))
    for row in rows:
        assert len(row.tokens_T) <= max_tokens or len(row.members) == 1
        assert sum(row.lengths) == len(row.targets_R) == len(row.predictors_R)
        place = 0
        for member, sequence, length in zip(row.members, row.sequences, row.lengths, strict=True):
            sample = samples[member]
            whole = sample.prompt_ids + sample.completion_ids
            assert row.tokens_T[sequence].tolist() == whole[:-1]
            assert row.positions_T[sequence].tolist() == list(range(len(whole) - 1))
            assert row.targets_R[place : place + length].tolist() == sample.completion_ids
            predictors = row.predictors_R[place : place + length]
            assert predictors.tolist() == sequence[len(sample.prompt_ids) - 1 :].tolist()
            place += length


@given(samples=SAMPLES, max_tokens=st.integers(1, 60))
def test_copies_are_counted_if_asked(samples, max_tokens):
    """Of two rows in succession the second one's first sample would not have fitted the first."""
    rows = pack(samples, range(len(samples)), max_tokens, counts_copies=True)
    assert [i for row in rows for i in row.members] == list(range(len(samples)))
    sizes = [[len(sequence) for sequence in row.sequences] for row in rows]
    assert all(sum(size) <= max_tokens or len(size) == 1 for size in sizes)
    assert all(sum(size) + after[0] > max_tokens for size, after in pairwise(sizes))


@given(samples=SAMPLES, max_tokens=st.integers(1, 60))
def test_no_token_is_computed_twice_or_for_nothing(samples, max_tokens):
    for row in pack(samples, range(len(samples)), max_tokens):
        assert set(np.concatenate(row.sequences)) == set(range(len(row.tokens_T)))
        beginnings = set()
        for sample in (samples[i] for i in row.members):
            whole = (*sample.prompt_ids, *sample.completion_ids[:-1])
            beginnings |= {whole[: end + 1] for end in range(len(whole))}
        assert len(row.tokens_T) == len(beginnings)
        assert row.size_unshared == _size([samples[i] for i in row.members])


def _size(samples: list[Sample]) -> int:
    """Prompts once, responses in full."""
    prompts = {tuple(sample.prompt_ids) for sample in samples}
    return sum(map(len, prompts)) + sum(len(sample.completion_ids) - 1 for sample in samples)


@given(samples=SAMPLES, max_tokens=st.integers(1, 60))
def test_a_row_is_closed_only_by_a_sample_that_does_not_fit(samples, max_tokens):
    rows = pack(samples, range(len(samples)), max_tokens)
    for row in rows:
        assert _size([samples[i] for i in row.members]) <= max_tokens or len(row.members) == 1
    for row, after in pairwise(rows):
        joined = [*row.members, after.members[0]]
        assert _size([samples[i] for i in joined]) > max_tokens


def test_only_the_chosen_members_in_their_order():
    samples = [_sample([n], [n, n]) for n in range(5)]
    (row,) = pack(samples, [3, 1], 100)
    assert row.members == (3, 1)
    assert row.targets_R.tolist() == [3, 3, 1, 1]


# -- shares of ranks -------------------------------------------------------------------------------

batches = st.builds(
    made_up_batch,
    groups=st.integers(1, 6),
    members=st.integers(1, 6),
    longest=st.integers(1, 60),
    seed=st.integers(0, 1000),
)


@given(batches, st.integers(1, 5), st.integers(1, 200))
def test_every_sample_is_in_one_row_of_one_rank_and_ranks_have_as_many_rows(batch, count, most):
    members = list(range(len(batch)))
    rows = [pack_for_rank(batch, members, most, rank, count) for rank in range(count)]
    assert len({len(own) for own in rows}) == 1
    found = [member for own in rows for row in own for member in row.members]
    assert found == members
    for own in rows:
        for row in own:
            assert len(row.tokens_T) > 0
            assert len(row.targets_R) == len(row.predictors_R) == max(sum(row.lengths), 1)


@given(batches, st.integers(2, 5))
def test_no_share_is_further_from_the_mean_than_a_sample_and_a_prompt(batch, count):
    def tokens(parts):
        return [sum(len(r.tokens_T) for r in pack(batch, part, 10**6)) for part in parts]

    (whole,) = tokens([range(len(batch))])
    longest = max(len(s.prompt_ids) + len(s.completion_ids) for s in batch)
    for size in tokens(cut(batch, range(len(batch)), count)):
        assert abs(size - whole / count) <= 2 * longest


def test_of_no_samples_there_are_no_rows():
    assert pack_for_rank([], [], 10, 1, 2) == []
