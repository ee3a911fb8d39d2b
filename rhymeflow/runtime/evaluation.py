"""Evaluations of versions on suites: groups that answer a suite's prompts, and figures of them.

Figures are over all answers that could be judged, all of one version. Groups of a lost instance
continue where their version is evaluated next.
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
from rhymeflow.suites.figures import JudgedAnswer, figures, said
from rhymeflow.suites.suite import SuitePrompts

if TYPE_CHECKING:
    from rhymeflow.store.writer import SqliteTrajectoryStore


@dataclass
class Evaluation:
    """The evaluation of version `asked` on a suite."""

    suite: SuitePrompts
    asked: Version
    instance: InstanceId | None = None
    """The one that answers; None: it is lost."""
    opening: set[int] = field(default_factory=set)
    """Rows that are not groups yet."""
    groups: dict[int, GroupId] = field(default_factory=dict)
    """By row."""
    judged: dict[tuple[int, int], JudgedAnswer | None] = field(default_factory=dict)
    """By row and member; None: that could not be judged."""
    error: str = ""
    """Why not, of the last of these."""

    @property
    def num_answers(self) -> int:
        """Answers, in all."""
        return len(self.suite.prompts) * self.suite.n

    def figures(self) -> dict[str, float]:
        """What comes of it, by name."""
        rows, n = range(len(self.suite.prompts)), self.suite.n
        judged = [[self.judged[row, member] for member in range(n)] for row in rows]
        return figures(judged, self.suite.section.pass_threshold)


class EvaluationResult(NamedTuple):
    """An evaluation that is complete."""

    event: events.Evaluated
    figures: dict[str, float]
    error: str
    """Why answers could not be judged, if some could not."""


ToDo = Drawn | Route | CloseEnvironments | EvaluationResult
"""A prompt to make a group of, a response to generate or to give up, a result to report."""


class Evaluations:
    """Evaluations in progress, on suites by name: takes events of their groups and gives commands,
    as the coordinator does for groups to train on."""

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
        """How many answers are judged, in words."""
        return ", ".join(
            f"{name}: {len(each.judged):,} of {each.num_answers:,} answers"
            for (name, _), each in self._in_progress.items()
        )

    def restore(self) -> None:
        """Take up the groups of an earlier attempt that are in flight."""
        for group_id, (suite, asked) in self._in_flight.of_suites.items():
            evaluation, group = self._evaluation(suite, asked), self._in_flight[group_id]
            evaluation.groups[group.drawn.prompt.row] = group_id
            if evaluation.suite.config.environment.is_used:
                # An instance says once more whether the last turn was over or cut.
                group.reasons.clear()

    def begin(
        self, instance: InstanceId, suite: SuiteName, version: Version, *, holds: bool
    ) -> Iterator[ToDo]:
        """`instance` answers a suite's prompts under `version`; `holds`: no pull is coming."""
        yield from self._give_up_outdated(suite, version, holds=holds)
        evaluation = self._evaluation(suite, version)
        evaluation.instance = instance
        for group in evaluation.groups.values():
            yield from self._generate(evaluation, group)
        rows = set(range(len(evaluation.suite.prompts)))
        missing = rows - evaluation.groups.keys() - evaluation.opening
        evaluation.opening |= missing
        for row in sorted(missing):
            yield self._in_flight.draw_for(suite, row, version)
        yield from self._result(evaluation)  # it may have been complete but for an instance

    def hear(self, event: Event | NotOpened) -> Iterator[ToDo]:
        """What happens; events of groups to train on are passed over."""
        match event:
            case events.GroupCreated(group=group) if group < 0:
                yield from self._created(self._in_flight[group].drawn)
            case NotOpened(drawn, error) if drawn.group < 0:
                yield from self._not_created(drawn, error)
            case events.Observed(trajectory=trajectory) if trajectory.group < 0:
                if (instance := self._of(trajectory).instance) is not None:
                    yield self._route(instance, trajectory)
            case events.TrajectoryRewarded(trajectory=trajectory) if trajectory.group < 0:
                yield from self._judged(trajectory, self._answer(trajectory, event.reward))
            case events.RewardFailed() | events.EnvironmentFailed() if event.trajectory.group < 0:
                self._of(event.trajectory).error = event.error
                yield from self._judged(event.trajectory, None)

    def leave(self, instance: InstanceId) -> None:
        """An instance is gone."""
        for evaluation in self._in_progress.values():
            if evaluation.instance == instance:
                evaluation.instance = None

    # -- what happened ------------------------------------------------------------------------

    def _created(self, drawn: Drawn) -> Iterator[ToDo]:
        assert drawn.version is not None
        evaluation, row = self._in_progress.get((drawn.suite, drawn.version)), drawn.prompt.row
        if evaluation is None or row not in evaluation.opening:
            self._in_flight.give_up(drawn.group, drawn.version)
            return
        evaluation.opening.discard(row)
        evaluation.groups[row] = drawn.group
        yield from self._generate(evaluation, drawn.group)

    def _not_created(self, drawn: Drawn, error: str) -> Iterator[ToDo]:
        """None of the prompt's answers can be had."""
        assert drawn.version is not None
        evaluation = self._in_progress.get((drawn.suite, drawn.version))
        if evaluation is not None and drawn.prompt.row in evaluation.opening:
            evaluation.error = error
            for member in range(evaluation.suite.n):
                evaluation.judged[drawn.prompt.row, member] = None
            evaluation.opening.discard(drawn.prompt.row)
            yield from self._result(evaluation)

    def _judged(self, trajectory: TrajectoryId, answer: JudgedAnswer | None) -> Iterator[ToDo]:
        evaluation = self._of(trajectory)
        row = self._in_flight[trajectory.group].drawn.prompt.row
        evaluation.judged[row, trajectory.member] = answer
        yield from self._result(evaluation)

    def _answer(self, trajectory: TrajectoryId, reward: float) -> JudgedAnswer:
        suite, group = self._of(trajectory).suite, self._in_flight[trajectory.group]
        sampled = self._in_flight.num_stored(trajectory) - sum(
            end - start for start, end in self._in_flight.turns(trajectory)
        )
        vote = said(group.last_turns[trajectory.member], suite.section.answer_pattern)
        return JudgedAnswer(reward, sampled, group.reasons[trajectory.member] in CUT, vote)

    # -- what is to be done -------------------------------------------------------------------

    def _give_up_outdated(
        self, suite: SuiteName, version: Version, *, holds: bool
    ) -> Iterator[ToDo]:
        """Give up evaluations that lost their instance and cannot continue under `version`; see
        `begin`."""
        for (name, asked), each in list(self._in_progress.items()):
            if name != suite or each.instance is not None:
                continue
            if holds and asked == version and self._versions(each) <= {version}:
                continue
            groups, n = each.groups.values(), each.suite.n
            yield CloseEnvironments(
                tuple(TrajectoryId(group, member) for group in groups for member in range(n))
            )
            for group in groups:
                self._in_flight.give_up(group, asked)
            del self._in_progress[name, asked]

    def _generate(self, evaluation: Evaluation, group_id: GroupId) -> Iterator[Route]:
        """The answers of a group that are neither complete nor waiting for their environment."""
        if evaluation.instance is None:
            return
        group = self._in_flight[group_id]
        row = group.drawn.prompt.row
        for member in range(evaluation.suite.n):
            trajectory = TrajectoryId(group_id, member)
            is_over = member in group.reasons or (row, member) in evaluation.judged
            is_asked = group.turns_ended.get(member, 0) > len(self._in_flight.turns(trajectory))
            if not is_over and not is_asked:
                yield self._route(evaluation.instance, trajectory)

    def _route(self, instance: InstanceId, trajectory: TrajectoryId) -> Route:
        version = self._in_flight[trajectory.group].drawn.version
        assert version is not None
        return Route(instance, 0, trajectory, version)

    def _result(self, evaluation: Evaluation) -> Iterator[EvaluationResult]:
        """What came of an evaluation, if it is complete."""
        if len(evaluation.judged) < evaluation.num_answers or evaluation.instance is None:
            return
        suite, found = evaluation.suite, evaluation.figures()
        (held,) = self._versions(evaluation) or {evaluation.asked}
        for group in evaluation.groups.values():
            self._in_flight.end(group)
            self._store.put_ending(group, "evaluated", version=held)
        del self._in_progress[suite.name, evaluation.asked]
        mean = found.get(f"avg@{suite.n}")
        event = events.Evaluated(evaluation.instance, evaluation.asked, mean, suite.name, held)
        yield EvaluationResult(event, found, evaluation.error)

    def _versions(self, evaluation: Evaluation) -> set[Version]:
        """What its answers so far are of."""
        groups = map(self._in_flight.__getitem__, evaluation.groups.values())
        return {version for group in groups for version in group.versions.values()}

    def _evaluation(self, suite: SuiteName, asked: Version) -> Evaluation:
        new = Evaluation(self._suites[suite], asked)
        return self._in_progress.setdefault((suite, asked), new)

    def _of(self, trajectory: TrajectoryId) -> Evaluation:
        drawn = self._in_flight[trajectory.group].drawn
        assert drawn.version is not None
        return self._in_progress[drawn.suite, drawn.version]
