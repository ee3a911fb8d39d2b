"""Evaluations of versions on suites: groups that answer a suite's prompts, and their figures.

An answer is a response to a suite's prompt. Figures cover all answers that could be judged, all by
one version. Groups of a lost instance continue on the next one that evaluates their version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from rhymeflow.core import events
from rhymeflow.core.commands import CloseEnvironments, Route
from rhymeflow.core.events import Event
from rhymeflow.core.types import CUT, GroupId, InstanceId, SuiteName, TrajectoryId, Version
from rhymeflow.runtime.in_flight import Drawn, InFlight, NotOpened
from rhymeflow.suites.figures import JudgedAnswer, figures, named, vote_of
from rhymeflow.suites.suite import SuitePrompts

if TYPE_CHECKING:
    from rhymeflow.store.writer import SqliteTrajectoryStore


@dataclass
class Evaluation:
    """The evaluation of version `requested` on a suite."""

    suite: SuitePrompts
    requested: Version
    instance: InstanceId | None = None
    """The instance that answers; None: it is lost."""
    ungrouped: set[int] = field(default_factory=set)  # rows that were drawn and have no group yet
    groups: dict[int, GroupId] = field(default_factory=dict)  # by row
    judged: dict[tuple[int, int], JudgedAnswer | None] = field(default_factory=dict)
    """Answers by row and member; None: the answer could not be judged."""
    error: str = ""
    """The error of the last answer that could not be judged; empty if there was none."""

    @property
    def num_answers(self) -> int:
        """The number of answers to all prompts of the suite."""
        return len(self.suite.prompts) * self.suite.n

    def figures(self) -> dict[str, float]:
        """The suite's figures, by name. All answers must be judged or failed."""
        rows, n = range(len(self.suite.prompts)), self.suite.n
        judged = [[self.judged[row, member] for member in range(n)] for row in rows]
        return figures(judged, self.suite.section.pass_threshold)


class EvaluationResult(NamedTuple):
    """The result of a complete evaluation."""

    event: events.Evaluated
    figures: dict[str, float]
    error: str
    """Why some answers could not be judged; empty if all were."""


EvaluationAction = Drawn | Route | CloseEnvironments | EvaluationResult
"""A prompt to make a group of, responses to generate or to give up, or a result to report."""


class Evaluations:
    """The evaluations in progress: turns events of their groups into actions, as the coordinator
    does for groups to train on."""

    def __init__(
        self,
        suites: Mapping[SuiteName, SuitePrompts],
        in_flight: InFlight,
        store: SqliteTrajectoryStore,
    ) -> None:
        self._suites, self._in_flight, self._store = suites, in_flight, store
        self._in_progress: dict[tuple[SuiteName, Version], Evaluation] = {}

    @property
    def progress(self) -> str:
        """How many answers to each suite are judged, for the display."""
        return ", ".join(
            f"{name}: {len(evaluation.judged):,} of {evaluation.num_answers:,} answers"
            for (name, _), evaluation in self._in_progress.items()
        )

    def restore(self) -> None:
        """Add the groups that are in flight from an earlier attempt."""
        for group_id, (suite, version) in self._in_flight.suite_groups.items():
            evaluation, group = self._evaluation(suite, version), self._in_flight[group_id]
            evaluation.groups[group.drawn.prompt.row] = group_id
            if evaluation.suite.config.environment.is_used:
                # An instance will report again whether the last turn ended or was cut.
                group.reasons.clear()

    def begin(
        self, instance: InstanceId, suite: SuiteName, version: Version, *, keeps_version: bool
    ) -> Iterator[EvaluationAction]:
        """Have `instance` answer a suite's prompts. `keeps_version`: it pulls no other first."""
        yield from self._give_up_outdated(suite, version, keeps_version=keeps_version)
        evaluation = self._evaluation(suite, version)
        evaluation.instance = instance
        for group in evaluation.groups.values():
            yield from self._generate(evaluation, group)
        rows = set(range(len(evaluation.suite.prompts)))
        missing = rows - evaluation.groups.keys() - evaluation.ungrouped
        evaluation.ungrouped |= missing
        for row in sorted(missing):
            yield self._in_flight.draw_for(suite, row, version)
        yield from self._result(evaluation)  # perhaps only an instance was missing

    def hear(self, event: Event | NotOpened) -> Iterator[EvaluationAction]:
        """Handle an event; those of groups to train on are ignored."""
        match event:
            case events.GroupCreated(group=group) if group < 0:
                yield from self._created(self._in_flight[group].drawn)
            case NotOpened(drawn, error) if drawn.group < 0:
                yield from self._not_created(drawn, error)
            case events.Observed(trajectory=trajectory) if trajectory.group < 0:
                if (instance := self._of(trajectory).instance) is not None:
                    yield self._route(instance, trajectory)
            case events.TrajectoryRewarded(trajectory=trajectory) if trajectory.group < 0:
                yield from self._judged(trajectory, self._judged_answer(trajectory, event.reward))
            case events.RewardFailed() | events.EnvironmentFailed() if event.trajectory.group < 0:
                self._of(event.trajectory).error = event.error
                yield from self._judged(event.trajectory, None)

    def leave(self, instance: InstanceId) -> None:
        """Note that an instance is gone."""
        for evaluation in self._in_progress.values():
            if evaluation.instance == instance:
                evaluation.instance = None

    # -- events -------------------------------------------------------------------------------

    def _created(self, drawn: Drawn) -> Iterator[EvaluationAction]:
        assert drawn.version is not None
        evaluation, row = self._in_progress.get((drawn.suite, drawn.version)), drawn.prompt.row
        if evaluation is None or row not in evaluation.ungrouped:
            self._in_flight.give_up(drawn.group, drawn.version)
            return
        evaluation.ungrouped.discard(row)
        evaluation.groups[row] = drawn.group
        yield from self._generate(evaluation, drawn.group)

    def _not_created(self, drawn: Drawn, error: str) -> Iterator[EvaluationAction]:
        """Count all answers to a prompt as failed."""
        assert drawn.version is not None
        evaluation = self._in_progress.get((drawn.suite, drawn.version))
        if evaluation is not None and drawn.prompt.row in evaluation.ungrouped:
            evaluation.error = error
            for member in range(evaluation.suite.n):
                evaluation.judged[drawn.prompt.row, member] = None
            evaluation.ungrouped.discard(drawn.prompt.row)
            yield from self._result(evaluation)

    def _judged(
        self, trajectory: TrajectoryId, answer: JudgedAnswer | None
    ) -> Iterator[EvaluationAction]:
        evaluation = self._of(trajectory)
        row = self._in_flight[trajectory.group].drawn.prompt.row
        evaluation.judged[row, trajectory.member] = answer
        yield from self._result(evaluation)

    def _judged_answer(self, trajectory: TrajectoryId, reward: float) -> JudgedAnswer:
        suite, group = self._of(trajectory).suite, self._in_flight[trajectory.group]
        num_observed = self._in_flight.num_observed(trajectory)
        num_sampled = self._in_flight.num_stored(trajectory) - num_observed
        vote = vote_of(group.last_turns[trajectory.member], suite.section.answer_pattern)
        return JudgedAnswer(reward, num_sampled, group.reasons[trajectory.member] in CUT, vote)

    # -- actions ------------------------------------------------------------------------------

    def _give_up_outdated(
        self, suite: SuiteName, version: Version, *, keeps_version: bool
    ) -> Iterator[EvaluationAction]:
        """Give up a suite's evaluations without an instance that cannot continue by `version`."""
        for (name, requested), evaluation in list(self._in_progress.items()):
            if name != suite or evaluation.instance is not None:
                continue
            if keeps_version and requested == version and self._versions(evaluation) <= {version}:
                continue
            groups, n = evaluation.groups.values(), evaluation.suite.n
            yield CloseEnvironments(
                tuple(TrajectoryId(group, member) for group in groups for member in range(n))
            )
            for group in groups:
                self._in_flight.give_up(group, requested)
            del self._in_progress[name, requested]

    def _generate(self, evaluation: Evaluation, group_id: GroupId) -> Iterator[Route]:
        """Route a group's answers that are neither complete nor waiting for their environment."""
        if evaluation.instance is None:
            return
        group = self._in_flight[group_id]
        row = group.drawn.prompt.row
        for member in range(evaluation.suite.n):
            trajectory = TrajectoryId(group_id, member)
            is_over = member in group.reasons or (row, member) in evaluation.judged
            if not is_over and not self._in_flight.waits_for_environment(trajectory):
                yield self._route(evaluation.instance, trajectory)

    def _route(self, instance: InstanceId, trajectory: TrajectoryId) -> Route:
        version = self._in_flight[trajectory.group].drawn.version
        assert version is not None
        return Route(instance, 0, trajectory, version)

    def _result(self, evaluation: Evaluation) -> Iterator[EvaluationResult]:
        """End an evaluation and yield its result, if it is complete."""
        if len(evaluation.judged) < evaluation.num_answers or evaluation.instance is None:
            return
        suite, figures, requested = evaluation.suite, evaluation.figures(), evaluation.requested
        functions = self._store.mean_rewards(evaluation.groups.values())
        figures |= named(functions)
        (held,) = self._versions(evaluation) or {requested}  # one sampled all, perhaps a newer one
        for group in evaluation.groups.values():
            self._in_flight.end(group)
            self._store.put_ending(group, "evaluated", version=held)
        del self._in_progress[suite.name, requested]
        mean = figures.get(f"avg@{suite.n}")
        event = events.Evaluated(evaluation.instance, requested, mean, suite.name, held)
        yield EvaluationResult(event, figures, evaluation.error)

    def _versions(self, evaluation: Evaluation) -> set[Version]:
        groups = map(self._in_flight.__getitem__, evaluation.groups.values())
        return {version for group in groups for version in group.versions.values()}

    def _evaluation(self, suite: SuiteName, version: Version) -> Evaluation:
        new = Evaluation(self._suites[suite], version)
        return self._in_progress.setdefault((suite, version), new)

    def _of(self, trajectory: TrajectoryId) -> Evaluation:
        drawn = self._in_flight[trajectory.group].drawn
        assert drawn.version is not None
        return self._in_progress[drawn.suite, drawn.version]
