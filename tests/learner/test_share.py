"""Shares of a batch: nothing is lost, ranks have equally much to do and equally often."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.learner.minibatch import cut, share
from rhymeflow.learner.packing import pack
from tests.learner.builders import made_up_batch

batches = st.builds(
    made_up_batch,
    groups=st.integers(1, 6),
    members=st.integers(1, 6),
    longest=st.integers(1, 60),
    seed=st.integers(0, 1000),
)


@given(batches, st.integers(2, 5), st.integers(1, 200))
def test_every_sample_is_in_one_row_of_one_rank_and_ranks_have_as_many_rows(batch, count, most):
    members = list(range(len(batch)))
    rows = [share(batch, members, most, rank, count) for rank in range(count)]
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


def test_one_rank_has_what_is_packed():
    batch = made_up_batch()
    alone = share(batch, range(16), 50, 0, 1)
    for one, other in zip(alone, pack(batch, range(16), 50), strict=True):
        assert one.members == other.members


def test_of_no_samples_there_are_no_rows():
    assert share([], [], 10, 1, 2) == []
