"""Which nodes of a draft are accepted, against the definition."""

from hypothesis import example, given
from hypothesis import strategies as st

from rhymeflow.engine.native.verify import accepted, depths
from rhymeflow.histospec.draft import Draft

TOKENS = st.integers(0, 3)


@st.composite
def trees(draw):
    tokens = draw(st.lists(TOKENS, max_size=12))
    return Draft(tokens, [draw(st.integers(-1, node - 1)) for node in range(len(tokens))])


def path_to(parents, node):
    """From the root's child to the node."""
    return [] if node < 0 else [*path_to(parents, parents[node]), node]


def slow_accepted(draft, sampled):
    """Walk from the sequence's last token: to the first child that is the token sampled, if any."""
    at, path = -1, []
    while True:
        children = [node for node, parent in enumerate(draft.parents) if parent == at]
        right = [node for node in children if draft.tokens[node] == sampled[at + 1]]
        if not right:
            return path
        at = right[0]
        path.append(at)


@given(trees(), st.lists(TOKENS, min_size=13, max_size=13))
@example(Draft([1, 1, 2, 2], [-1, -1, 1, 0]), [1, 2, 2, 0, 0])
def test_accepted_is_the_walk_along_the_drawn_tokens(draft, sampled):
    sampled = sampled[: 1 + len(draft.tokens)]
    path = accepted(draft, sampled)
    assert path == slow_accepted(draft, sampled)
    # what it is for: the accepted tokens are those sampled, one after another
    generated = [sampled[row] for row in [0, *(node + 1 for node in path)]]
    assert [draft.tokens[node] for node in path] == generated[:-1]
    assert path == path_to(draft.parents, path[-1] if path else -1)


@given(trees())
def test_depth_is_the_number_of_nodes_on_the_path(draft):
    parents = draft.parents
    assert depths(parents) == [len(path_to(parents, node)) for node in range(len(parents))]
