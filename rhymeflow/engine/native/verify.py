"""What of a verified draft is accepted: the path of it that the target's own tokens follow.

Every row of a draft is run and the target's token is sampled at each, with that position's noise.
The first is the response's next token, whatever was drafted. If a child of the row is that token,
what was sampled at the child is the one after it, and so on: all of them are what decoding one by
one would have sampled, as logits depend on the tokens before them alone and noise on the position
alone. The draft is a point mass, so this is also rejection sampling with the residual sampled in
advance (Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding",
2023, appendix A.1); there are no ratios to compare.
"""

from __future__ import annotations

from rhymeflow.histospec.draft import Draft


def depths(parents: list[int]) -> list[int]:
    """Each node's distance from the sequence, from 1."""
    size = len(parents)
    if parents == list(range(-1, size - 1)):
        return list(range(1, size + 1))
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def accepted(draft: Draft, sampled: list[int]) -> list[int]:
    """Return the nodes that are accepted, from the first to the deepest.

    `sampled`: the target's token at the sequence's last token, then at each node.
    """
    path: list[int] = []
    wanted, last = sampled[0], -1
    # Children stand behind their parents, so one pass meets the whole path.
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if parent == last and token == wanted:
            path.append(node)
            wanted, last = sampled[node + 1], node
    return path
