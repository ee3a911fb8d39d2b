"""An agent's response, one row of tokens, is taken apart into the sequences that it was made of."""

from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.store.branches import Asked, sequences, stretches

turns = st.lists(
    st.tuples(st.integers(-1, 9), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=8
)
"""Of each: the turn that it follows (by number, -1 or a later one: none), and how long call and
turn are."""


@given(turns)
def test_sequences_are_the_paths_of_the_tree_of_turns(drawn):
    row: list[int] = []
    calls: list[Asked] = []
    paths: list[list[int]] = []  # the tokens up to the end of each turn
    asked: list[list[int]] = []
    ends: list[int] = []
    leaves = set()
    for number, (parent, call, turn) in enumerate(drawn):
        follows = parent if 0 <= parent < number else None
        start = len(row)
        new = list(range(start, start + call + turn))
        row += new
        before = [] if follows is None else paths[follows]
        asked.append(before + new[:call])
        paths.append(before + new)
        calls.append(Asked(start, start + call, 0 if follows is None else ends[follows]))
        ends.append(len(row))
        leaves = leaves - {follows} | {number}

    def tokens(parts):
        return [token for start, end in parts for token in row[start:end]]

    assert [tokens(stretches(calls, end)) for end in ends] == paths
    assert [tokens(stretches(calls, each.end)) for each in calls] == asked
    assert [tokens(each) for each in sequences(calls, len(row))] == [
        paths[leaf] for leaf in sorted(leaves)
    ]
