"""Restores the learner of a resumed run: from a checkpoint, and by training on batches again.

The newest whole checkpoint of a published version is loaded, and the batches since are trained on
again, each with its attempt's configuration; skipped steps are skipped again. On a CPU, or with
deterministic kernels, the weights are the same to the last bit; the log has their checksum."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, count, pairwise
from pathlib import Path

import numpy as np

from rhymeflow.config import Config
from rhymeflow.core.commands import Accumulate, Train
from rhymeflow.core.types import CUT, GroupId, Version
from rhymeflow.data.encode import PromptEncoder
from rhymeflow.data.prompts import Prompt, told
from rhymeflow.environments.template import load_settled
from rhymeflow.errors import UserError
from rhymeflow.learner.learner import Learner
from rhymeflow.learner.sample import Sample
from rhymeflow.reward.components import WeightedSum
from rhymeflow.store import codec
from rhymeflow.store.branches import Asked, sequences
from rhymeflow.store.checkpoint_dirs import CHECKPOINTS, CheckpointPlace, owner_of
from rhymeflow.store.handle import Reader
from rhymeflow.store.previous_run import config_of
from rhymeflow.store.reader import TrajectoryRecord
from rhymeflow.store.schema import PUBLISHED

_SKIPPED = """SELECT json_extract(body, '$.version'), json_extract(body, '$.skipped') FROM events
    WHERE kind = 'VersionPublished' AND json_array_length(body, '$.skipped') > 0 AND seq >= ?"""
_CHECKSUMS = """SELECT json_extract(body, '$.checksum') FROM events
    WHERE kind IN ('VersionPublished', 'LearnerReady') AND json_extract(body, '$.version') = ?"""
_TRAINED = """SELECT event, body FROM commands WHERE kind = 'Train' ORDER BY seq DESC LIMIT ?"""


TeacherPrompts = Callable[[GroupId], list[int]]
"""Returns the tokens that a teacher reads in place of a group's prompt."""


def published(reader: Reader) -> Version:
    """Return the last published version; 0 if none was trained."""
    rows = reader.query(PUBLISHED)
    return rows[0][0] if rows else 0


def skipped_in_a_row(reader: Reader) -> int:
    """Return how many of this attempt's last steps were skipped in a row."""
    attempts = reader.attempts()
    skipped = _skipped(reader, attempts[-1].first_event if attempts else 0)
    last = published(reader)
    return next(n for n in count() if last - n not in skipped)


def place_here(config: Config, run_dir: Path, reader: Reader) -> CheckpointPlace:
    """Return where checkpoints are. Raises `UserError` unless this node reaches the place."""
    elsewhere = config.run.checkpoint_dir
    if elsewhere is None and not run_dir.is_dir():
        raise UserError(
            f"run.output_dir: there is no {run_dir} on {socket.gethostname()}: the learner saves "
            "there; name run.checkpoint_dir, which its nodes and the controller's reach"
        )
    owner = owner_of(reader.attempts()) if elsewhere else None
    place = CheckpointPlace(elsewhere or run_dir / CHECKPOINTS, owner)
    place.check_owner()
    return place


def from_checkpoint(
    learner: Learner, reader: Reader, place: CheckpointPlace, checksum: Callable[[], str]
) -> list[tuple[Version, str]]:
    """Restore the newest whole checkpoint, if any; return newer ones, each with its problem. The
    log must have the `checksum` of the restored weights. Raises `UserError` if weights with another
    checksum were restored and no earlier checkpoint is whole, or the storage fails."""
    damaged: list[tuple[Version, str]] = []
    has_changed = False
    for version, saved in reversed(place.up_to(published(reader)).items()):
        try:
            learner.restore(saved)
        except UserError as error:  # nothing was restored
            damaged.append((version, str(error)))
            continue
        if checksum() in _checksums(reader, version):
            return damaged
        has_changed = True
        damaged.append((version, f"{saved}: the checksum of its weights is not that of the log"))
    if has_changed:
        _, problem = damaged[-1]
        raise UserError(
            f"{problem}, and no earlier checkpoint is whole; without it the learner "
            "trains on all batches of the log again"
        )
    return damaged


def train_again(
    learner: Learner, reader: Reader, config: Config, read: TeacherPrompts | None = None
) -> Iterator[tuple[Version, Version]]:
    """Train `learner` up to the last published version; before each step, yield the version that it
    makes and the last one. `read` is as for `samples`. Raises `UserError` if tokens of a batch were
    deleted."""
    last, skipped = published(reader), _skipped(reader)
    for train, attempt in _batches(reader, learner.version, last):
        yield train.version + 1, last
        learner.reconfigure(attempt.learner)
        *early, rest = [
            samples(reader.batch(part.groups, part.members), attempt, read) for part in parts(train)
        ]
        for part in early:
            learner.accumulate(part)
        learner.train(rest, train.version, skip=skipped.get(train.version + 1, ()))
    learner.reconfigure(config.learner)


def _checksums(reader: Reader, version: Version) -> set[str]:
    """Return the logged checksums of a version, as it was published and as it was restored."""
    return {checksum for (checksum,) in reader.query(_CHECKSUMS, version)}


def samples(
    records: Iterable[TrajectoryRecord], config: Config, read: TeacherPrompts | None = None
) -> list[Sample]:
    """Make samples of stored responses, with the reward weights of `config` and what a teacher
    reads in place of the prompt, if it does."""
    weights = WeightedSum(config.reward.functions, config.environment.judges).weights
    found: list[Sample] = []
    for record in records:
        whole = Sample(
            group=record.group,
            prompt_ids=record.prompt_ids,
            completion_ids=record.completion_ids,
            logprobs=record.logprobs,
            versions=record.versions,
            reward=record.reward,
            truncated=record.reason in CUT,
            components=record.components,
            weights=weights,
            observed=record.observed if any(record.observed) else [],
            teacher_prompt_ids=None if read is None else read(record.group),
        )
        found += _sequences(whole, record.calls) if record.calls else [whole]
    return found


def _sequences(whole: Sample, calls: list[Asked]) -> list[Sample]:
    """Return the sequences of an agent's response. A sampled token is in the loss of the first that
    it is in."""
    ends, trained = {call.start: call.end for call in calls}, np.array(whole.observed)
    found: list[Sample] = []
    for parts in sequences(calls, len(whole.completion_ids)):
        prompt = range(parts[0][0], ends[parts[0][0]])
        places = [place for start, end in parts for place in range(start, end)][len(prompt) :]
        sample = replace(
            whole,
            prompt_ids=[whole.completion_ids[place] for place in prompt],
            completion_ids=[whole.completion_ids[place] for place in places],
            logprobs=[whole.logprobs[place] for place in places],
            versions=[whole.versions[place] for place in places],
            observed=trained[places].tolist(),
            sequence=len(found),
        )
        trained[places] = True
        found.append(sample)
    return found


def teacher_prompts(reader: Reader, config: Config) -> TeacherPrompts | None:
    """Return what makes the prompts of `learner.distillation.prompt`; None: there is none."""
    if (template := config.learner.distillation.prompt) is None:
        return None
    tokenizer, _ = load_settled(config)
    unlimited = config.data.model_copy(update={"max_prompt_length": None})
    encoder = PromptEncoder(tokenizer, unlimited)

    @lru_cache(config.learner.groups_per_batch)
    def read(group: GroupId) -> list[int]:
        statement = "SELECT prompt, columns FROM groups WHERE group_id = ?"
        ((stored, columns),) = reader.query(statement, group)
        prompt = Prompt(group, codec.prompt_of(stored), json.loads(columns), f"group {group}")
        return encoder.encode(told(prompt, template))

    return read


def _skipped(reader: Reader, since: int = 0) -> dict[Version, list[int]]:
    """Return the indices of skipped optimizer steps, by the version that their batch made."""
    return {version: json.loads(numbers) for version, numbers in reader.query(_SKIPPED, since)}


def parts(train: Train) -> list[Accumulate]:
    """Split a batch into the parts that were accumulated early and the rest, which may be empty."""
    ends = [*accumulate(train.parts, initial=0), len(train.groups)]
    return [
        Accumulate(train.version, train.groups[start:end], train.members[start:end])
        for start, end in pairwise(ends)
    ]


def _batches(reader: Reader, first: Version, last: Version) -> list[tuple[Train, Config]]:
    """Return the batches from `first` to before `last`, each with its attempt's configuration."""
    attempts = reader.attempts()
    batches = []
    # One row more than these batches: training on batch `last` may have begun.
    for event, body in reversed(reader.query(_TRAINED, last - first + 1)):
        command = json.loads(body)
        if first <= command["version"] < last:
            attempt = max((a for a in attempts if a.first_event <= event), key=lambda a: a.number)
            groups, members = tuple(command["groups"]), tuple(map(tuple, command["members"]))
            early = tuple(command.get("parts", ()))
            train = Train(command["version"], groups, members, early)
            batches.append((train, config_of(attempt, reader.path)))
    numbers = [train.version for train, _ in batches]
    assert numbers == list(range(first, last)), "a batch is missing"
    return batches
