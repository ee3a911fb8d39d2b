"""Whether rows are those that a run began with: groups, answers and their order go by row numbers.

Holds true: two sequences of prompts have one digest if their prompts and columns are equal, in
order, wherever they were read. One pass over what is loaded; knows nothing of where it is kept.
"""

from __future__ import annotations

import msgspec
import xxhash

from rhymeflow.data.prompts import PromptSource
from rhymeflow.errors import UserError


def digest(prompts: PromptSource) -> str:
    """How many rows, and 32 hexadecimal digits of what they are."""
    encode = msgspec.msgpack.Encoder(order="deterministic").encode
    content = xxhash.xxh3_128()
    for row in range(len(prompts)):
        content.update(encode((prompts[row].prompt, prompts[row].columns)))
    return f"{len(prompts)} {content.hexdigest()}"


def check(what: str, source: str, before: str, now: str) -> None:
    """Look whether rows of `source` are as they were, by their digests; `what` they are.

    Raises:
        UserError: they are not.
    """
    if now == before:
        return
    was, are = (each.partition(" ")[0] for each in (before, now))
    count = f"{are} rows instead of {was}" if was != are else f"other content in its {was} rows"
    raise UserError(
        f"{what}: {source} has {count} since the run began, which goes on by their numbers: "
        "put back what was there, or begin a new run with a checkpoint of this one as --model.name"
    )


__all__ = ["check", "digest"]
