"""The exactness tests can fail: each way to verify wrongly makes their comparison differ.

The rules are put in where the engine looks for them; drafts are half right, all right or trees.
"""

import pytest

from rhymeflow.engine.native import engine as engine_module
from rhymeflow.engine.native.cache import KVCache
from rhymeflow.engine.native.sampler import Draws, sample
from rhymeflow.engine.native.verify import accepted
from tests.engine.drafters import noisy, right, tree
from tests.engine.exactness import assert_same, drafted, undrafted


def always_the_first(draft, sampled):
    """The draft's first token is taken for the target's."""
    if draft.tokens:
        sampled[0] = draft.tokens[0]
    return accepted(draft, sampled)


def after_a_rejection(draft, sampled):
    """A wrong token is passed over, and those behind it may still be accepted."""
    return [
        node
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True))
        if token == sampled[parent + 1]
    ]


def one_too_many(draft, sampled):
    """The token that the target has sampled instead is not asked for at the last node."""
    path = accepted(draft, sampled)
    deeper = [n for n, parent in enumerate(draft.parents) if parent == (path or [-1])[-1]]
    return path + deeper[:1]


def use(rule):
    return lambda patch: patch.setattr(engine_module, "accepted", rule)


def likely_enough(patch):
    """A drafted token is accepted if it is one of the target's two likeliest."""
    rows = []

    def remembered(logits_RV, draws):
        rows.extend(logits_RV.topk(2).indices.tolist())
        return sample(logits_RV, draws)

    def rule(draft, sampled):
        likeliest = [rows.pop(0) for _ in sampled]
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            if token in likeliest[parent + 1]:
                sampled[parent + 1] = token
        return accepted(draft, sampled)

    patch.setattr(engine_module, "sample", remembered)
    patch.setattr(engine_module, "accepted", rule)


def shifted_noise(shift):
    """The row of a draft's last token draws with the noise of another position."""

    def put_in(patch):
        def shifted(logits_RV, draws):
            moved = [
                Draws(how, stream, [*at[:-1], at[-1] + shift] if len(at) > 1 else at)
                for how, stream, at in draws
            ]
            return sample(logits_RV, moved)

        patch.setattr(engine_module, "sample", shifted)

    return put_in


def in_a_row(patch):
    """A tree's tokens stand at positions one behind the other, as a line's do."""
    patch.setattr(engine_module, "depths", lambda parents: list(range(1, len(parents) + 1)))


def left_where_they_were(patch):
    """Keys and values of an accepted branch are not moved together."""
    patch.setattr(KVCache, "gather", lambda *args: None)


BROKEN = {
    "one of the two likeliest": (likely_enough, noisy(0.5, 9)),
    "always the first": (use(always_the_first), noisy(0.5, 9)),
    "after a rejection": (use(after_a_rejection), noisy(0.5, 9)),
    "one too many": (use(one_too_many), noisy(0.5, 9)),
    "noise of the position after": (shifted_noise(1), right(5)),
    "noise of the position before": (shifted_noise(-1), right(5)),
    "a tree in a row": (in_a_row, tree(0.5, 14)),
    "a branch not moved": (left_where_they_were, tree(0.5, 14)),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_noticed(name, dtype, monkeypatch):
    put_in, draft = BROKEN[name]
    expected, _ = undrafted("plain", dtype)
    requests, _, _ = drafted(draft, "plain", dtype)
    assert_same(requests, expected)
    put_in(monkeypatch)
    requests, _, _ = drafted(draft, "plain", dtype)
    assert [request.tokens for request in requests] != [request.tokens for request in expected]
    with pytest.raises(AssertionError):
        assert_same(requests, expected)
