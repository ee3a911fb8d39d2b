"""Writes a run's metrics, a row for each version and evaluation, and keeps the display current."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rhymeflow.config import Config
from rhymeflow.core.commands import Drop
from rhymeflow.core.events import EnvironmentFailed, Event, RewardFailed
from rhymeflow.core.types import HELD_OUT, Version
from rhymeflow.observe.learning import DIVERGENCE, Learning, Verdict
from rhymeflow.observe.limits import Limits
from rhymeflow.observe.metrics import EXTRA, VERDICTS, MetricsWriter
from rhymeflow.observe.printable import shortened
from rhymeflow.observe.progress import Progress, ProgressState, ShownResponse
from rhymeflow.runtime.base import Role
from rhymeflow.runtime.disk_space import DiskSpace
from rhymeflow.runtime.observer import Observer
from rhymeflow.runtime.throughput import WINDOW, Throughput
from rhymeflow.suites.figures import REWARD, headlines
from rhymeflow.workers.messages import BatchTrained, Publication, RewardComputed

if TYPE_CHECKING:
    from rhymeflow.store.backup import BackupThread

RESPONSE_SECONDS = 2.0  # how long the display shows a response at least

ROW = ("step", "time", "epoch")
"""Fields of a row besides metrics; entries for transformers' callbacks have epochs."""


class Reporter:
    """Collects metrics, writes them and shows them."""

    def __init__(
        self,
        config: Config,
        metrics: MetricsWriter,
        progress: Progress,
        *,
        seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        observer: Observer | None = None,
    ) -> None:
        """`seconds`: how long earlier attempts at the run took, in all. They and all times that are
        written and shown are the run's: of an emulated cluster, if there is one."""
        self.observer = observer or Observer()
        self._metrics, self._progress, self._clock = metrics, progress, clock
        self.scale = config.emulation.scale  # seconds of the run in one second of this machine
        self._started = clock() - seconds / self.scale
        has_drafts = config.drafting.window != "off"
        self.throughput = Throughput(has_drafts=has_drafts, window=WINDOW * self.scale)
        self.endings = {"consumed": 0, "filtered": 0, "aborted": 0}
        self._num_filtered = 0  # groups that were filtered since the last step
        self._failed = 0
        """Training responses since the last step whose reward function or environment failed."""
        self._state = ProgressState(
            config.name,
            config.learner.max_steps,
            config.schedule.bound,
            has_drafts=has_drafts,
            emulated=config.emulation.said,
            scale=self.scale,
        )
        self._measure = "reward"
        if not config.has_rewards:
            self._measure, self._state.measure = DIVERGENCE, "from teacher"
        self._limits, self._learning = Limits(config.schedule.bound), Learning(config)
        self._trained_tokens = 0.0
        self.earlier: Mapping[Version, Mapping[str, Any]] = {}
        """Metrics of earlier attempts, by version, until this one begins to train."""
        self._logged: dict[tuple[str, str], list[float]] = {}
        """Values that reward functions logged since the last step, by prefix and name."""
        self._suites = {HELD_OUT, *(suite.name for suite in config.eval.suites)}
        self._renamed: set[str] = set()
        self._response_at = -RESPONSE_SECONDS
        self.space: DiskSpace | None = None
        """Checks the run directory's disk, once the size of a checkpoint is known."""
        self.backup: BackupThread | None = None

    def continue_from(
        self, rows: Mapping[Version, Mapping[str, Any]], endings: Mapping[str, int]
    ) -> None:
        """Continue from earlier attempts: their metrics by step, and how groups ended."""
        self.endings |= endings
        self.earlier = rows
        state = self._state
        state.step = state.resumed_at = max(rows, default=0)
        values = (row.get(self._measure) for row in rows.values())
        state.rewards += [value for value in values if value is not None]
        for step, row in rows.items():
            self._show_evaluation(step, row)
            self._learning.take(step, row)
        self._learning.judge()  # what held already is no news
        state.verdicts = self._learning.now
        tokens = (row.get("num_tokens") or 0.0 for row in rows.values())
        self._trained_tokens = max(tokens, default=0.0)

    @property
    def now(self) -> float:
        """Seconds of this machine since the run began."""
        return self._clock() - self._started

    @property
    def time(self) -> float:
        """Seconds of the run since it began."""
        return self.now * self.scale

    def begin_training(self) -> None:
        """Begin to measure steps, once there is an instance or a batch. Later calls do nothing."""
        if self._state.first_step_at is not None:
            return
        self._state.first_step_at = self.time
        cpu = time.process_time() * self.scale
        self.throughput.begin(self.time, {"cpu": cpu}, self._trained_tokens)
        if self._state.emulated:
            self.say(self._state.emulated)
        self.observer.begin(self.earlier)
        self.earlier = {}

    def end_step(
        self,
        trained: BatchTrained,
        published: Publication,
        history: dict[str, float],
        *,
        coordinator: float,
        store: float,
    ) -> None:
        """Write the metrics of a published version. `coordinator`, `store`: their total seconds."""
        now, version = self.time, trained.version + 1
        rates = self.throughput.end_step(
            now,
            trained=trained.metrics["num_tokens"],
            learner_seconds=trained.seconds + published.seconds,
            coordination_seconds={
                "coordinator": coordinator * self.scale,
                "store": store * self.scale,
                "cpu": time.process_time() * self.scale,
            },
        )
        own = {
            **trained.metrics,
            **rates,
            **history,
            "params/push_s": published.seconds,
            **published.metrics,
            **{f"endings/{name}": float(count) for name, count in self.endings.items()},
        }
        if self._failed:
            own["rewards/failed"], self._failed = float(self._failed), 0
        if self.backup is not None:
            own["backup/behind_s"] = self.backup.behind
        metrics = {**self._take_logged(own), **own}
        for problem in self._metrics.write(version, now, metrics):
            self.warn(problem)
        self._show_step(version, metrics)
        self._judge(version, metrics)
        self.observer.step_ended(version, metrics)

    def _show_step(self, version: Version, metrics: Mapping[str, float]) -> None:
        self._num_filtered = 0
        state = self._state
        state.step = version
        state.rewards += [metrics[self._measure]] if self._measure in metrics else []
        state.trained_tokens_per_s = self.throughput.trained_tokens_per_s
        # A step that drafts nothing has no figures of drafts, and shows no earlier ones.
        kept = {n: value for n, value in state.latest.items() if not n.startswith("draft/")}
        state.latest = kept | dict(metrics)
        self._limits.add(metrics)
        state.limit = self._limits.now

    def _judge(self, version: Version, metrics: Mapping[str, float]) -> None:
        """Say whether the run learns, each verdict once for each time that it begins to hold."""
        self._tell(version, self._learning.add(version, metrics))

    def _tell(self, version: Version, news: Iterable[Verdict]) -> None:
        for verdict in news:
            row = {"step": version, "time": round(self.time, 3), **verdict._asdict()}
            self._metrics.append(VERDICTS, row)
            self._progress.warn(f"step {version}: {verdict.line}")
            self.observer.judged(version, verdict)
        self._state.verdicts = self._learning.now

    def dropped(self, command: Drop) -> None:
        """Count and show that a group ended untrained."""
        self.endings[command.ending] += 1
        if command.ending == "filtered":
            self._num_filtered += 1
            self._tell(self._state.step, self._learning.filtered(self._num_filtered))
        self.say(f"group {command.group} {command.ending}: {command.reason}")

    def evaluated(self, version: Version, metrics: dict[str, float]) -> None:
        """Write and show the metrics of a suite under `version`."""
        self._show_evaluation(version, metrics)
        for problem in self._metrics.write(version, self.time, metrics):
            self.warn(problem)
        self._judge(version, metrics)
        self.observer.evaluated(version, metrics)

    def _show_evaluation(self, version: Version, metrics: Mapping[str, Any]) -> None:
        if REWARD in metrics:
            self._state.eval_rewards.append(metrics[REWARD])
            self._state.eval_steps.append(version)
        self._state.suites |= headlines(metrics)

    def count_failures(self, happened: Iterable[Event]) -> None:
        """Count the training responses that can have no reward."""
        for event in happened:
            if isinstance(event, RewardFailed | EnvironmentFailed) and event.trajectory.group >= 0:
                self._failed += 1

    def log(self, message: RewardComputed, prefix: str) -> None:
        """Take what reward functions log. The next step's metrics have the means of numbers, named
        with `prefix`; columns of values beside responses are kept."""
        for name, value in message.noted:
            self._logged.setdefault((prefix, name), []).append(value)
        now = round(self.time, 3)
        for column, values in message.extra.items():
            row = {"of": message.key, "time": now, "column": column, "values": values}
            self._metrics.append(EXTRA, row)

    def _take_logged(self, own: Mapping[str, float]) -> dict[str, float]:
        """Return the means of values logged since the last step, and forget these. A name that the
        run itself uses gets the prefix `logged/`, with one warning."""
        means = {}
        for (prefix, name), values in self._logged.items():
            full = prefix + name
            if self._is_own(prefix, name, own):
                full = f"{prefix}logged/{name}"
                if full not in self._renamed:
                    self._renamed.add(full)
                    self.warn(f"log_metric({name!r}): the run has this name; see {full}")
            means[full] = sum(values) / len(values)
        self._logged = {}
        return means

    def _is_own(self, prefix: str, name: str, own: Mapping[str, float]) -> bool:
        """Whether the run itself writes a metric of this name; held-out answers have a `prefix`."""
        if prefix:
            return name == "reward" or name.startswith(tuple(f"{s}/" for s in self._suites))
        return name in own or name in ROW or name.startswith("eval/")

    @property
    def wants_response(self) -> bool:
        """Whether the display has room for a response, and has shown the last one long enough."""
        return self._progress.shows_responses and self.now - self._response_at >= RESPONSE_SECONDS

    def show_response(self, response: ShownResponse) -> None:
        """Show a response of the batch that is being trained on."""
        self._state.response, self._response_at = response, self.now

    def printed(self, role: Role, line: str, log: str) -> None:
        """Say where what user code prints can be read, with its first `line`."""
        who = "reward functions print" if role == "reward" else "environments print"
        self._progress.printed(f"{who}: {shortened(line, 200)}", log)

    def saved(self, version: Version, path: str) -> None:
        """Tell the backup and the observer of a complete checkpoint."""
        if self.backup is not None:
            self.backup.saved(version)
        self.observer.saved(version, path)

    def warn(self, message: str) -> None:
        """Show a warning that stays visible."""
        self._progress.warn(message)
        self.say(message)

    def say(self, message: str) -> None:
        """Show what the run does now."""
        self._state.message = message
        self.show()

    def show(self) -> None:
        """Bring the display up to date."""
        self._state.elapsed = self.time
        if self.space is not None and (warning := self.space.warning(self.now)):
            self.warn(warning)
        if self.backup is not None and (notice := self.backup.notice()):
            self.warn(notice)
        if self._state.first_step_at is not None:
            self._state.running = self.throughput.running
            self._state.waiting = self.throughput.waiting
        self._progress.update(self._state)
