"""Writes a simulated run as a run directory, for all tools that read runs (docs/inspecting.md).

It has the coordinator's events and commands, with virtual times, but no tokens, texts or losses.
Each response's iterations and drafted tokens are estimated by the mean of its instance."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from rhymeflow import build
from rhymeflow.config import Config
from rhymeflow.config.run import RunConfig
from rhymeflow.core import events
from rhymeflow.core.commands import Command, Drop, FinishEarly, Route, Train
from rhymeflow.core.events import Event
from rhymeflow.core.types import GroupId, InstanceId, TrajectoryId
from rhymeflow.errors import UserError
from rhymeflow.observe import metrics
from rhymeflow.observe.metrics import MetricsWriter
from rhymeflow.sim.audit import PublishedStep
from rhymeflow.sim.cluster import Cluster
from rhymeflow.store.schema import ENVIRONMENT, EVENTS, is_written
from rhymeflow.store.writer import SqliteTrajectoryStore

Cut = tuple[int, InstanceId]
"""(first token, the instance or `ENVIRONMENT` that generated from there on)."""


_REPLACED = metrics.FILE, "result.json", "timeline.png"
"""What a simulation writes beside its events, and another one there replaces."""


class Record:
    """Writes a simulated run into a directory. Raises `UserError` if the directory holds a real
    run, or another simulation is writing there."""

    def __init__(
        self, directory: Path, config: Config, on_step: Callable[[int], object] = lambda step: None
    ) -> None:
        """`on_step` is called with the number of each step that has ended."""
        if (directory / "config.yaml").exists():
            raise UserError(f"{directory}: holds a run; a simulation needs a directory of its own")
        foreign = [name for name in _REPLACED if (directory / name).exists()]
        if foreign and not (directory / EVENTS).exists():
            raise UserError(f"{directory}: has a {foreign[0]} that no simulation wrote")
        self._directory, self._config, self._on_step = directory, config, on_step
        self._is_open = False
        self._last_event = 0  # its number in the store
        self._cuts: dict[TrajectoryId, list[Cut]] = {}
        self._last = PublishedStep(0, 0.0, 0.0, 0.0)
        self._generated = self._trained = 0.0  # tokens until then
        self._ages: Counter[int] = Counter()  # `Audit.staleness` then

    def _open(self) -> None:
        """Replace an earlier simulation, once it is certain that this one can run."""
        directory, config = self._directory, self._config
        directory.mkdir(parents=True, exist_ok=True)
        if is_written(directory):
            raise UserError(f"{directory}: another simulation is being written there")
        for old in directory.glob(f"{EVENTS}*"):
            old.unlink()
        for name in _REPLACED:
            (directory / name).unlink(missing_ok=True)  # or they would stay if this one is stopped
        self._store = SqliteTrajectoryStore(directory / EVENTS)
        started = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
        config = config.model_copy(update={"schedule": build.rules_in_force(config)})
        self._store.begin_attempt(config.model_dump_json(), now=0.0, started=started)
        self._metrics = MetricsWriter(
            directory, run=RunConfig(report_to=()), name=config.name, config={}
        )
        self._is_open = True

    def hear(self, cluster: Cluster, event: Event) -> None:
        """Write an event that the coordinator receives now."""
        if not self._is_open:
            self._open()
        store = self._store
        self._last_event = store.record(cluster.now, [event])
        match event:
            case events.GroupCreated(group, row, epoch, tokens):
                text, ids = f"simulated prompt {row}", [0] * tokens
                store.put_group(
                    group, row=row, epoch=epoch, prompt=text, prompt_tokens=ids, columns={}
                )
            case events.TurnEnded(trajectory=trajectory, length=length) if trajectory in self._cuts:
                self._cuts[trajectory].append((length, ENVIRONMENT))
            # A response may end before it hears that its group has: that is not stored.
            case events.TrajectoryFinished(trajectory, _, length, reason) if (
                trajectory in self._cuts
            ):
                store.put_finished(trajectory, length=length, reason=reason)
            case events.TrajectoryRewarded(trajectory, reward) if trajectory in self._cuts:
                store.put_reward(trajectory, reward=reward, components={})
            case events.VersionPublished():
                self._step(cluster)

    def obey(self, cluster: Cluster, commands: Sequence[Command]) -> None:
        """Write the commands that the last event caused."""
        store = self._store
        for command in commands:
            store.record_command(self._last_event, command)
            match command:
                case Route(trajectory=trajectory, instance=instance):
                    self._route(cluster, trajectory, instance)
                case FinishEarly(trajectory):
                    length = cluster.audit.responses[trajectory].generated
                    store.put_finished(trajectory, length=length, reason="finished_early")
                case Train(version, groups, members):
                    for group, chosen in zip(groups, members, strict=True):
                        self._end(cluster, group)
                        store.put_consumed(group, version=version, members=chosen)
                case Drop(group=group, ending=ending, reason=reason):
                    self._end(cluster, group)
                    store.put_ending(group, ending, version=cluster.published, reason=reason)

    def close(self) -> None:
        """Close all files."""
        if self._is_open:
            self._store.commit()
            self._store.close()
            self._metrics.close()

    def _route(self, cluster: Cluster, trajectory: TrajectoryId, instance: InstanceId) -> None:
        response = cluster.audit.responses.get(trajectory)
        cut = 0 if response is None else response.generated, instance
        self._cuts.setdefault(trajectory, []).append(cut)

    def _end(self, cluster: Cluster, group: GroupId) -> None:
        """Write the spans of the group's responses: by which instance, under which version."""
        for response in cluster.audit.groups[group].members:
            cuts = self._cuts.pop(response.id)
            edges = sorted({at for at, _ in (*cuts, *response.parts)} | {response.generated})
            for start, end in pairwise(edges):
                instance = [name for at, name in cuts if at <= start][-1]
                versions = [version for at, version in response.parts if at <= start]
                steps = drafted = 0
                if instance != ENVIRONMENT:
                    rate, share = self._drafts(cluster, instance)
                    steps = max(1, round((end - start) / rate))
                    drafted = round(share * steps)
                self._store.put_span(
                    response.id, start=start, length=end - start, version=versions[-1],
                    instance=instance, steps=steps, drafted=drafted,
                )  # fmt: skip

    def _drafts(self, cluster: Cluster, name: InstanceId) -> tuple[float, float]:
        """Return the instance's mean tokens and drafted tokens per iteration until now."""
        tally = next(each.tally for each in cluster.all_instances if each.name == name)
        if not tally.decode_steps:
            return 1.0, 0.0
        return 1 + tally.accepted / tally.decode_steps, tally.drafted / tally.decode_steps

    def _step(self, cluster: Cluster) -> None:
        """Write the metrics of the step that has ended."""
        step, last = cluster.steps[-1], self._last
        batch, seconds = cluster.audit.batches[step.version - 1], step.time - last.time
        self._trained += batch.total_tokens
        generated = sum(each.tally.tokens_generated for each in cluster.all_instances)
        ages = cluster.audit.staleness - self._ages
        self._ages = cluster.audit.staleness.copy()
        rollout = (step.rollout_busy - last.rollout_busy) / (seconds * cluster.num_instances)
        figures = {
            "step_time": seconds,
            "completions/mean_length": batch.sampled_tokens / batch.responses,
            "num_tokens": self._trained,
            "staleness/mean": sum(age * n for age, n in ages.items()) / ages.total(),
            "staleness/max": max(ages),
            "rollout/tokens_per_s": (generated - self._generated) / seconds,
            "idle/rollout": 1 - rollout,
            "idle/learner": 1 - (step.learner_busy - last.learner_busy) / seconds,
            **cluster.coordinator.state.lengths.metrics(),
        }
        self._metrics.write(step.version, step.time, figures)
        self._last, self._generated = step, generated
        self._store.commit()
        self._on_step(step.version)
