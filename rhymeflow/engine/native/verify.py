"""Accepts the path of a draft tree that equals the tokens that the model itself samples.

The model runs on the sequence's last token and on every node of the draft, and a token is sampled
after each with its position's noise. The first is the response's next token, whatever was drafted.
If a child has that token it is accepted, and the token sampled after it is the next one, and so on.
Decoding token by token would sample the same tokens: logits depend only on the tokens before them,
and noise only on the position. Since a draft is a point mass, this is also rejection sampling with
the residual sampled in advance (Leviathan, Kalman and Matias, "Fast Inference from Transformers via
Speculative Decoding", 2023, appendix A.1), without ratios to compare."""

from __future__ import annotations

from rhymeflow.histospec.draft import Draft


def depths(parents: list[int]) -> list[int]:
    """Return each node's depth in the draft tree, from 1; `parents` are earlier nodes, or -1."""
    size = len(parents)
    if parents == list(range(-1, size - 1)):
        return list(range(1, size + 1))
    depth_of: list[int] = []
    for parent in parents:
        depth_of.append(1 if parent < 0 else depth_of[parent] + 1)
    return depth_of


def accepted(draft: Draft, sampled: list[int]) -> list[int]:
    """Return the accepted nodes, from the first to the deepest. `sampled` has the tokens sampled
    after the sequence's last token, then after each node of the draft."""
    path: list[int] = []
    wanted, last = sampled[0], -1
    # Children come after their parents, so one pass finds the whole path.
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if parent == last and token == wanted:
            path.append(node)
            wanted, last = sampled[node + 1], node
    return path
