"""One response token by token, from the store alone: what is known of each, and its text.

Holds true: per token there is one entry in each list, or the list is `None`: tokens were deleted
(`run.keep_tokens`), or the run kept no details (`run.token_details`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from rhymeflow.core.types import TrajectoryId
from rhymeflow.errors import UserError
from rhymeflow.store import codec
from rhymeflow.store.previous_run import config_in_force
from rhymeflow.store.reader import TrajectoryDetails, TrajectoryReader

if TYPE_CHECKING:
    from rhymeflow.config import Config

MAX_EARLIER = 20
"""Groups of the same prompt in earlier epochs that are named, the newest ones."""

_DETAILS = "SELECT logprobs, flags FROM token_details WHERE group_id = ? AND member = ?"
_ACCEPTED = """SELECT accepted, LENGTH(tokens) / 4, steps FROM segments
    WHERE group_id = ? AND member = ? ORDER BY start"""
_SIBLINGS = """SELECT member FROM segments WHERE group_id = ?1
    UNION SELECT member FROM pruned WHERE group_id = ?1 ORDER BY member"""
_EARLIER = f"""SELECT group_id, epoch FROM groups WHERE row = ? AND epoch < ?
    ORDER BY epoch DESC, group_id DESC LIMIT {MAX_EARLIER}"""

Load: TypeAlias = "Callable[[Config], Callable[[list[int]], list[str]]]"
"""Returns what makes a text of each token; `UserError` if it cannot be had."""


@dataclass(frozen=True, slots=True)
class Token:
    """What is known of a token; `None` is what is not, or does not apply."""

    position: int
    text: str
    """Where no tokenizer is at hand, its number."""
    version: int
    is_observed: bool
    """Whether an environment answered it: nothing of what follows applies then, but flags."""
    logprob: float | None
    """When it was sampled."""
    learner: float | None
    """Its log-probability when it was trained on."""
    accepted: bool | None
    """Whether it was drafted."""
    flags: int | None
    """1 clipped, 2 capped, 4 masked."""


def whole(
    run_dir: Path,
    reader: TrajectoryReader,
    trajectory: TrajectoryId,
    texts: Callable[[list[int]], list[str] | None],
) -> dict[str, Any]:
    """What is stored of a response. `texts` makes a text of each token; `None`: it cannot.

    Raises:
        UserError: there is no such response.
    """
    with reader.one_state():
        details = details_of(run_dir, reader, trajectory)
        learner, flags = _learner(reader, trajectory)
        accepted = _accepted(reader, trajectory)
        siblings = reader.query(_SIBLINGS, trajectory.group)
        earlier = reader.query(_EARLIER, details.row, details.epoch)
    tokens = [token for each in details.segments for token in each.tokens]
    logprobs = [value for each in details.segments for value in each.logprobs]
    return {
        "directory": str(run_dir),
        "group": trajectory.group,
        "member": trajectory.member,
        "row": details.row,
        "epoch": details.epoch,
        "prompt": codec.prompt_of(details.prompt),
        "columns": details.columns,
        "text": details.text,
        "length": details.length,
        "reason": details.reason,
        "reward": details.reward,
        "components": details.components,
        "step": None if details.trained is None else details.trained + 1,
        "ending": details.ending,
        "ending_reason": details.ending_reason,
        "segments": _segments(details),
        "tokens": tokens or None,
        "texts": texts(tokens) if tokens else None,
        "logprobs": logprobs or None,
        "learner_logprobs": learner,
        "flags": flags,
        "accepted": accepted,
        "siblings": [member for (member,) in siblings],
        "earlier": [{"group": group, "epoch": epoch} for group, epoch in earlier],
    }


def details_of(
    run_dir: Path, reader: TrajectoryReader, trajectory: TrajectoryId
) -> TrajectoryDetails:
    """What is stored of a response.

    Raises:
        UserError: nothing is.
    """
    details = reader.details(trajectory)
    if details is None:
        ((groups,),) = reader.query("SELECT COUNT(DISTINCT group_id) FROM spans")
        raise UserError(f"{run_dir}: has no trajectory {trajectory}; {groups} groups have any")
    return details


def tokens_of(found: dict[str, Any]) -> list[Token]:
    """The tokens of what `whole` found; none if they were deleted."""
    if found["tokens"] is None:
        return []

    def at(name: str, position: int) -> Any:
        return None if found[name] is None else found[name][position]

    tokens = []
    for segment in found["segments"]:
        observed = segment["observed"]
        for position in range(segment["start"], segment["start"] + segment["length"]):
            text, accepted = at("texts", position), at("accepted", position)
            tokens.append(
                Token(
                    position,
                    f"⟨{found['tokens'][position]}⟩" if text is None else text,
                    segment["version"],
                    observed,
                    None if observed else at("logprobs", position),
                    None if observed else at("learner_logprobs", position),
                    None if observed or accepted is None else bool(accepted),
                    at("flags", position),
                )
            )
    return tokens


def load_texts(config: Config) -> Callable[[list[int]], list[str]]:
    """Return what makes a text of each token with the run's tokenizer."""
    from rhymeflow.models.tokenizer import load_tokenizer  # loads transformers

    tokenizer = load_tokenizer(config.model)
    return lambda tokens: [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]


def texts_of(
    reader: TrajectoryReader, load: Load | None = None
) -> Callable[[list[int]], list[str] | None]:
    """What makes texts with the run's tokenizer, by default from where the configuration says."""

    def texts(tokens: list[int]) -> list[str] | None:
        try:
            return (load or load_texts)(config_in_force(reader))(tokens)
        except UserError:  # who shows them says that there are numbers only
            return None

    return texts


def _segments(details: TrajectoryDetails) -> list[dict[str, Any]]:
    return [
        {
            "start": each.start,
            "length": each.length,
            "version": each.version,
            "instance": each.instance,
            "steps": each.steps,
            "drafted": each.drafted,
            "observed": each.is_observed,
        }
        for each in details.segments
    ]


def _learner(
    reader: TrajectoryReader, trajectory: TrajectoryId
) -> tuple[list[float] | None, list[int] | None]:
    rows = reader.query(_DETAILS, *trajectory)
    if not rows:
        return None, None
    logprobs, flags = rows[0]
    found = None if logprobs is None else np.frombuffer(logprobs, "<f4").tolist()
    return found, list(flags)


def _accepted(reader: TrajectoryReader, trajectory: TrajectoryId) -> list[int] | None:
    """1 for a token that was drafted; none of them is known where a segment does not say."""
    found: list[int] = []
    for accepted, length, steps in reader.query(_ACCEPTED, *trajectory):
        if accepted is None and steps:
            return None
        found += [0] * length if accepted is None else list(accepted)
    return found or None


__all__ = ["Load", "Token", "details_of", "load_texts", "texts_of", "tokens_of", "whole"]
