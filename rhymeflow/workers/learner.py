"""The learner worker, one rank: reads a batch, trains on it, publishes the new version.

All ranks get the same messages, read the same batches and own the memory of their rows; only rank 0
(role `learner`) answers. A batch that breaks the staleness bound is refused before training, by the
stored versions of its tokens (law 1). A version can be pulled before it is reported.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rhymeflow.config import Config, ModelConfig
from rhymeflow.core.commands import Accumulate, Train
from rhymeflow.core.events import Accumulated, LearnerReady, VersionPublished
from rhymeflow.core.types import TrajectoryId, Version
from rhymeflow.data.encode import Tokenizer
from rhymeflow.emulation import Pace, pace_of
from rhymeflow.environments.template import settle
from rhymeflow.errors import within
from rhymeflow.learner.checkpoint import Saver
from rhymeflow.learner.learner import Learner
from rhymeflow.learner.ranks import ALONE, MeetingPlace, Ranks, address_of, meeting_place, own_gpu
from rhymeflow.learner.sample import Sample
from rhymeflow.learner.token_details import TokenDetails
from rhymeflow.models.load import resolve_dtype
from rhymeflow.models.lora import load_policy, policy_rows, versioned
from rhymeflow.models.precision import resolve_device
from rhymeflow.models.rope import fix_longrope
from rhymeflow.models.rows import WeightRows
from rhymeflow.models.tokenizer import check_teacher, load_tokenizer
from rhymeflow.store.checkpoint_dirs import CheckpointPlace
from rhymeflow.store.handle import explained, store_reader
from rhymeflow.store.reader import TrajectoryRecord
from rhymeflow.utils import objects, progress
from rhymeflow.utils.consecutive_failures import ConsecutiveFailures
from rhymeflow.utils.gpu_turn import GpuTurn
from rhymeflow.utils.process import keep_freed_memory
from rhymeflow.weights.proof import as_text
from rhymeflow.weights.publish import make_store
from rhymeflow.workers import messages, restore
from rhymeflow.workers.channel import Channel
from rhymeflow.workers.messages import AnyMessage, Envelope, receive, send

PATIENCE = 10.0
"""Seconds that a rank waits after a failed collective, for the controller to replace all ranks."""

SAVING_SECONDS = 0.05
"""How often an idle learner checks whether a checkpoint is written, for which a run's end waits."""

STATE_BYTES = 12
"""Bytes per parameter in a checkpoint: master weight and AdamW's two moments, in float32."""


def main(connection: Channel, name: str, config: Config, run_dir: Path) -> None:
    """Serve the run until `Shutdown`, alone or as rank 0 of several."""
    count = config.learner.num_ranks
    if count == 1:
        serve(connection, config, run_dir, 0, None)
        return
    place = meeting_place(count, host=objects.address())
    send(connection, messages.RanksMeet(address_of(place)))
    serve(connection, config, run_dir, 0, place)


def serve(
    connection: Channel,
    config: Config,
    run_dir: Path,
    rank: int,
    place: MeetingPlace | None,
    waiting: Sequence[AnyMessage] = (),
) -> None:
    """Serve the run as a rank until `Shutdown`; several ranks meet at `place`. `waiting`: messages
    that arrived before they met.

    A rank that fails because another is gone waits to be replaced instead of reporting a defect.
    """
    keep_freed_memory()
    count, device = config.learner.num_ranks, resolve_device(config.model)
    if count > 1:
        device = own_gpu(device)
    learner = None
    try:
        # Silent ranks are replaced before the others' collectives time out.
        seconds = 2 * config.run.worker_timeout
        ranks = ALONE if place is None else Ranks.meet(place, rank, count, device, seconds)
        learner = LearnerProcess(connection, config, run_dir, ranks, waiting)
        learner.serve()
        ranks.leave()
    except RuntimeError:
        if count > 1:  # the rank that caused it is reported first, and this process is ended
            time.sleep(PATIENCE)
        raise
    finally:
        if learner is not None:
            learner.weights.close()


class LearnerProcess:
    """The learner, the store that it reads batches from, and the weights that it publishes.
    `waiting`: messages that arrived before it was made."""

    ranks, _pace = ALONE, Pace()  # for subclasses with an `__init__` of their own
    _waiting: Sequence[AnyMessage] = ()
    _teacher_prompts: restore.TeacherPrompts | None = None
    _gpu_turn: GpuTurn | None = None
    _published: Future[None] | None = None
    """What a thread is publishing, or has published."""

    def __init__(
        self,
        connection: Channel,
        config: Config,
        run_dir: Path,
        ranks: Ranks = ALONE,
        waiting: Sequence[AnyMessage] = (),
    ) -> None:
        self.connection, self.config, self.ranks = connection, config, ranks
        self._waiting = waiting
        self._pace = pace_of(config)
        if config.rollout.vllm_sleeps:
            self._gpu_turn = GpuTurn(run_dir, is_learner=True)
        self._reader = store_reader(config, run_dir)
        self._teacher_prompts = restore.teacher_prompts(self._reader, config)
        place = restore.place_here(config, run_dir, self._reader)
        device = ranks.device or resolve_device(config.model)
        dtype = resolve_dtype(config.model, device)
        self.learner = self._load(device, dtype)
        self._saver = Saver(place, is_lead=ranks.is_lead)
        with explained(self._reader), self._turn():
            damaged, retrain_seconds = self._restore(place)
        self.weights = make_store(config, self.learner.manifest(), run_dir, ranks)
        self._publisher = ThreadPoolExecutor(1, "publishing")
        checksum = self.weights.publish(self.version, self.learner.rows())
        if not ranks.is_lead:
            return
        model, own = self.learner.model, versioned(self.learner.model).values()
        num_parameters = sum(each.numel() for each in own)
        loaded = messages.LoadedModel(
            handle=self.weights.handle,
            device=device.type,
            dtype=str(dtype).removeprefix("torch."),
            max_length=model.config.get_text_config().max_position_embeddings,
            checkpoint_bytes=num_parameters * (dtype.itemsize + STATE_BYTES)
            + self.learner.num_of_critic * STATE_BYTES,
            retrain_seconds=retrain_seconds,
            num_parameters=num_parameters,
            num_trained=sum(each.numel() for each in own if each.requires_grad),
            damaged=damaged,
        )
        self._send(Envelope(LearnerReady(self.version, as_text(checksum)), loaded))

    def _restore(self, place: CheckpointPlace) -> tuple[list[tuple[Version, str]], float]:
        """Bring the learner to the last published version; return damaged checkpoints with their
        problems, and how many seconds training again took."""
        learner, reader, limit = self.learner, self._reader, self.config.learner.max_skipped_steps
        damaged = restore.from_checkpoint(
            learner, reader, place, lambda: as_text(learner.checksum())
        )
        began, since = time.perf_counter(), None
        for step, last in restore.train_again(learner, reader, self.config, self._teacher_prompts):
            self._pace.hold_training(learner.charged, since, num_steps=1)
            since = self._pace.now()
            self._send(messages.Retraining(step, last))
        self._pace.hold_training(learner.charged, since, num_steps=1)
        self.version: Version = learner.version
        self._skips = ConsecutiveFailures(
            limit, "learner.max_skipped_steps", "steps", restore.skipped_in_a_row(reader)
        )
        self._begin_batch()
        self._ending = False
        return damaged, time.perf_counter() - began

    def _load(self, device: torch.device, dtype: torch.dtype) -> Learner:
        """Make the learner, with the whole model or this rank's rows of it."""
        config, ranks = self.config, self.ranks
        tokenizer = load_tokenizer(config.model)
        # A template that was given goes into checkpoints; a variant for training does not.
        settle(tokenizer, config.data, has_turns=False)
        common = (tokenizer, config.learner, config.rollout, dtype, ranks)
        teacher: dict[str, Any] = {}
        if config.teacher_model is not None:
            with within("learner.distillation.teacher"):
                teacher = self._teacher(config.teacher_model, tokenizer, dtype, device)
        if ranks.count == 1:
            # In float32, so that the master weights are exact; the learner computes in `dtype`.
            exact = dtype if config.model.lora.is_used else torch.float32
            seed = config.run.seed
            model = load_policy(config.model, dtype=exact, device=device, seed=seed)
            return Learner(fix_longrope(model, config), *common, **teacher)
        model, read = policy_rows(config.model, dtype=dtype, seed=config.run.seed)
        has_reference = config.learner.needs_start and not config.model.lora.is_used
        reference, critic = (
            fix_longrope(WeightRows(config.model).skeleton(), config) if each else None
            for each in (has_reference, config.learner.has_critic)
        )
        given = {"reference": reference, "critic": critic, **teacher}
        return Learner(fix_longrope(model, config), *common, read=read, **given)

    def _teacher(
        self, model: ModelConfig, tokenizer: Tokenizer, dtype: torch.dtype, device: torch.device
    ) -> dict[str, Any]:
        """Return the teacher, whole or as `_load` does, as arguments of the learner."""
        check_teacher(model, tokenizer)
        if self.ranks.count == 1:
            whole = load_policy(model, dtype=dtype, device=device)
            return {"teacher": fix_longrope(whole, self.config)}
        skeleton, read = policy_rows(model, dtype=dtype, seed=self.config.run.seed)
        return {"teacher": fix_longrope(skeleton, self.config), "read_teacher": read}

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """As a context, have the GPU's memory, if engines sleep meanwhile (`vllm_sleeps`)."""
        if self._gpu_turn is None:
            yield
            return
        with self._gpu_turn.wanted():
            yield
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # or torch would keep what engines need

    def _send(self, message: AnyMessage) -> None:
        if self.ranks.is_lead:
            send(self.connection, message)

    def serve(self) -> None:
        """Carry out messages until `Shutdown`."""
        progress.has_started = True
        while not self._ending:
            self.turn()
        self._end_publishing()

    def turn(self) -> None:
        """Carry out the next message, if one arrives, and report written checkpoints."""
        progress.advance()
        if self._waiting:
            first, *self._waiting = self._waiting
            self._carry_out(first)
        elif self.connection.poll(SAVING_SECONDS if self._saver.is_busy else messages.WAIT_SECONDS):
            self._carry_out(receive(self.connection))
        if self._published is not None and self._published.done():
            self._end_publishing()
        self._report_saved()

    def _carry_out(self, message: AnyMessage) -> None:
        match message:
            case Accumulate():
                with self._turn():
                    self._accumulate(message)
                self._send(Accumulated(message.version, len(self._early)))
            case Train():
                with self._turn():
                    self._train(message)
            case messages.Publish(version=version):
                self._publish(version)
            case messages.SaveCheckpoint(keep=keep):
                self._end_publishing()  # checkpoints are of published versions
                self._saver.begin(self.version, self.learner.snapshot(), keep)
            case messages.Shutdown():
                self._ending = True
            case _:
                raise AssertionError(f"unexpected message {message}")

    def _accumulate(self, part: Accumulate) -> None:
        assert part.version == self.version, (part.version, self.version)
        started = self._pace.now()
        with self._read(part) as (batch, details):
            self.learner.accumulate(batch, details)
        self._pace.hold_training(self.learner.charged, started)
        self._early.append(part)
        self._early_seconds += self._pace.now() - started

    def _train(self, message: Train) -> None:
        assert message.version == self.version, (message.version, self.version)
        *early, rest = restore.parts(message)
        if self._early != early[: len(self._early)]:  # one was lost, or is not of this batch
            self.learner.forget()
            self._begin_batch()
        for part in early[len(self._early) :]:
            self._accumulate(part)
        began = self._pace.now()
        started = began - self._early_seconds
        with self._read(rest) as (batch, details):
            metrics = self.learner.train(batch, self.version, details)
        self._pace.hold_training(self.learner.charged, began, num_steps=1)
        metrics["staleness/mean"] = sum(self._ages) / len(self._ages)
        metrics["staleness/max"] = max(self._ages)
        self.version += 1
        seconds = self._pace.now() - started
        if self._pace.cost is not None:
            metrics["emulation/learner_behind"] = self._pace.behind_share()
        self._begin_batch()
        first_reason = next(iter(self.learner.skipped.values()), None)
        self._skips.count(first_reason)
        self._send(messages.BatchTrained(message.version, metrics, seconds))

    def _begin_batch(self) -> None:
        self._early: list[Accumulate] = []
        """The parts of the next batch whose gradient is accumulated already."""
        self._early_seconds = 0.0
        self._ages: list[Version] = []
        """Ages, in versions, of the trajectories of the next batch that were read so far."""

    @contextmanager
    def _read(self, part: Accumulate) -> Iterator[tuple[list[Sample], TokenDetails | None]]:
        """Yield the samples of a part and, with `run.token_details`, a record of their details that
        is reported after the block."""
        records = self._reader.batch(part.groups, part.members)
        self._ages += staleness(records, self.version, self.config.schedule.bound)
        batch = restore.samples(records, self.config, self._teacher_prompts)
        if not self.config.run.token_details:
            yield batch, None
            return
        details = TokenDetails(batch, self.config.learner)
        yield batch, details
        self._report(self.learner.whole_details(details), records)

    def _report(self, details: TokenDetails, records: list[TrajectoryRecord]) -> None:
        responses = [
            messages.ResponseDetails(TrajectoryId(record.group, record.member), logprobs, flags)
            for record, (logprobs, flags) in zip(records, details.blobs(), strict=True)
        ]
        self._send(messages.BatchDetails(responses))

    def _publish(self, version: Version) -> None:
        """Publish the version; where a GPU copies it, in a thread, while the next batch begins."""
        assert version == self.version, (version, self.version)
        self._end_publishing()
        started = self._pace.now()
        if self._pace.cost is not None:  # instances can pull as soon as the store has it
            self._pace.hold(self._pace.cost.push, started)
        begun = self.weights.begin(self.learner.rows())
        skipped = self.learner.skipped  # of the batch that made this version

        def finish() -> None:
            checksum = as_text(self.weights.finish(version, begun))
            seconds, reason = self._pace.now() - started, next(iter(skipped.values()), "")
            published = VersionPublished(version, checksum, tuple(skipped), reason)
            data = messages.Publication(seconds, dict(self.weights.metrics))
            self._send(Envelope(published, data))

        if begun.copied is None:
            finish()
            return
        self.learner.copied = begun.copied
        self._published = self._publisher.submit(finish)
        self._send(Accumulated(version, 0))

    def _end_publishing(self) -> None:
        """Wait until what is being published is; raise what has failed there."""
        published, self._published = self._published, None
        if published is not None:
            published.result()

    def _report_saved(self) -> None:
        for version, path, error in self._saver.ended():
            self._send(messages.CheckpointEnded(version, str(path), error))


def staleness(
    records: list[TrajectoryRecord], version: Version, max_staleness: int
) -> list[Version]:
    """Return the age in versions of each trajectory of batch `version`; asserts the bound."""
    ages = [version - min(record.versions) for record in records]
    for record, age in zip(records, ages, strict=True):
        if not 0 <= age <= max_staleness:
            raise AssertionError(
                f"trajectory {record.group}.{record.member} in batch {version} is {age} versions "
                f"old; max_staleness is {max_staleness}"
            )
    return ages
