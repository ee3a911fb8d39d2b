"""The history worker: copies stored responses into the index that drafts come from.

Answers to suites' prompts are copied too, so each evaluation drafts from the one before. No worker
waits for this one, and it changes no token (law 3). Only it writes to its index, in shared memory;
a successor rebuilds the index from the store."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from rhymeflow.config import Config, DataConfig
from rhymeflow.core.events import TrajectoryRewarded
from rhymeflow.core.types import TrajectoryId
from rhymeflow.histospec.drafter import rehearse
from rhymeflow.histospec.index import Index
from rhymeflow.histospec.noise_sharing import epoch_of_noise
from rhymeflow.store.follow import Follower, NewSegment
from rhymeflow.store.handle import store_reader
from rhymeflow.store.previous_run import config_of
from rhymeflow.utils import progress, shared_memory
from rhymeflow.workers.channel import Channel
from rhymeflow.workers.messages import HistoryGrew, Shutdown, receive, send

NICENESS = 10
"""Of this worker, below those that sample or train. It is set after `rehearse`, since they wait for
the code that it compiles."""

POLL_SECONDS = 0.25
"""Time between reads of the store after one that found something; a response takes longer."""

IDLE_SECONDS = 1.0
"""The longest time between two reads, and so between two messages to the controller."""

SEGMENTS_AT_ONCE = 256  # most segments between two checks for a message of the controller

PROMPTS_REMEMBERED = 256  # number of groups whose prompts are cached


def main(connection: Channel, name: str, config: Config, run_dir: Path) -> None:
    """Write the responses of `drafting.history_run`, then this run's, until `Shutdown`."""
    rehearse(config)
    if not config.emulation.is_used:  # a cluster's history has a core of its own
        os.nice(NICENESS)
    drafting = config.drafting
    index = Index(
        max_tokens=drafting.history_tokens,
        max_responses=drafting.history_responses,
        shared=True,
        prefix=shared_memory.prefix_for(run_dir, "h"),
    )
    try:
        send(connection, HistoryGrew(index.handle, 0))
        writers = [] if drafting.history_run is None else [_previous_run(index, config)]
        reader = store_reader(config, run_dir)
        follower = Follower(reader, num_tokens=drafting.history_tokens)
        serve(connection, index, [*writers, IndexWriter(index, follower, config)])
    finally:
        index.close()


def serve(connection: Channel, index: Index, writers: list[IndexWriter]) -> None:
    """Write new segments until `Shutdown`; each writer begins once the one before has no more."""
    wait = 0.0
    progress.has_started = True
    while not connection.poll(wait):
        count = writers[0].write()
        if count < SEGMENTS_AT_ONCE and len(writers) > 1:
            del writers[0]
        elif count == SEGMENTS_AT_ONCE:
            wait = 0.0
        elif count:
            wait = POLL_SECONDS
        else:
            wait = min(max(2 * wait, POLL_SECONDS), IDLE_SECONDS)
        send(connection, HistoryGrew(index.handle, index.num_tokens))
    message = receive(connection)
    assert isinstance(message, Shutdown), message


def _previous_run(index: Index, config: Config) -> IndexWriter:
    """Return the writer of `drafting.history_run`. Its responses are aligned if both runs have the
    same seed and number prompts alike, since they have the same noise then."""
    assert config.drafting.history_run is not None
    reader = store_reader(config, Path(config.drafting.history_run))
    previous = config_of(reader.attempts()[-1], reader.path)
    follower = Follower(reader, num_tokens=config.drafting.history_tokens)
    is_numbered_alike = _numbering(previous.data) == _numbering(config.data)
    aligned = is_numbered_alike and previous.run.seed == config.run.seed
    return IndexWriter(index, follower, previous, aligned=aligned)


def _numbering(data: DataConfig) -> DataConfig:
    """Return the fields that number prompts, without those that a run fills in when it begins."""
    return data.model_copy(update={"chat_template": None, "size": None, "eval_size": 0})


class IndexWriter:
    """Writes the responses of one run's store to the index; `config` is that run's. `aligned`: they
    were sampled with this run's noise."""

    def __init__(
        self, index: Index, follower: Follower, config: Config, *, aligned: bool = True
    ) -> None:
        self._index, self._follower, self._config = index, follower, config
        self._aligned = aligned
        self._open: dict[TrajectoryId, int] = {}
        """The numbers in the index of responses that are not rewarded yet."""
        self._rewarded: list[TrajectoryRewarded] = []  # their responses may have unread segments
        self._prompt = lru_cache(PROMPTS_REMEMBERED)(follower.prompt)
        """Returns the epoch in which a group was requested, and its prompt's tokens."""

    def write(self) -> int:
        """Write new segments, at most `SEGMENTS_AT_ONCE`; return how many."""
        # Read rewards before segments: once no segment is left to read, the index has every segment
        # of the rewarded responses, and they can be finished.
        self._rewarded += self._follower.rewards()
        segments = self._follower.segments(SEGMENTS_AT_ONCE)
        for segment in segments:
            self._take(segment)
        if len(segments) < SEGMENTS_AT_ONCE:
            for rewarded in self._rewarded:
                if rewarded.trajectory in self._open:
                    self._index.finish(self._open.pop(rewarded.trajectory), rewarded.reward)
            self._rewarded.clear()
        return len(segments)

    def _take(self, segment: NewSegment) -> None:
        trajectory = segment.trajectory
        if segment.start == 0:
            self._open[trajectory] = self._begin(segment)
        elif trajectory not in self._open:
            return  # its beginning is no longer kept
        response = self._open[trajectory]
        self._index.extend(response, segment.tokens)
        if segment.reward is not None and segment.start + len(segment.tokens) == segment.length:
            self._index.finish(response, segment.reward)
            del self._open[trajectory]

    def _begin(self, segment: NewSegment) -> int:
        group, member = segment.trajectory
        epoch, prompt_ids = self._prompt(group)
        if len(self._open) >= self._index.handle.max_responses:
            # It was never rewarded (its group was dropped); the index has replaced it.
            del self._open[next(iter(self._open))]
        return self._index.begin(
            prompt_ids,
            sample=member,
            noise_epoch=epoch_of_noise(self._config, epoch, member) if self._aligned else -1,
        )
