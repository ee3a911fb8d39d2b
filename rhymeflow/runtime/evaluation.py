"""Evaluations of versions on suites: groups that answer a suite's prompts, and figures of them.

Figures are over every answer that could be judged; all answers of an evaluation are of one version.
Groups of an instance that is lost go on where their version is evaluated next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rhymeflow.core.events import Evaluated
from rhymeflow.core.types import CUT, GroupId, InstanceId, SuiteName, TrajectoryId, Version
from rhymeflow.runtime.in_flight import Drawn, InFlight
from rhymeflow.suites.figures import Judged, figures, said
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
    judged: dict[tuple[int, int], Judged | None] = field(default_factory=dict)
    """By row and member; None: that could not be judged."""
    error: str | None = None
    """Why not, of the last of these."""

    @property
    def num_answers(self) -> int:
        """Answers, in all."""
        return len(self.suite.prompts) * self.suite.suite.n

    def figures(self) -> dict[str, float]:
        """What comes of it, by name."""
        rows, n = range(len(self.suite.prompts)), self.suite.suite.n
        judged = [[self.judged[row, member] for member in range(n)] for row in rows]
        return figures(judged, self.suite.suite.suite.pass_threshold)


class Evaluations:
    """Evaluations in progress, on these suites by name.

    `generate` has an instance go on with a response. `evaluated` is called with the version, suite
    and figures of each that is complete and, if answers could not be judged, why.
    """

    def __init__(
        self,
        suites: Mapping[SuiteName, SuitePrompts],
        in_flight: InFlight,
        store: SqliteTrajectoryStore,
        *,
        generate: Callable[[InstanceId, TrajectoryId], None],
        evaluated: Callable[..., None],
    ) -> None:
        self.suites = suites
        self._in_flight, self._store = in_flight, store
        self._generate, self._evaluated = generate, evaluated
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
            if evaluation.suite.suite.config.environment.is_used:
                # An instance says once more whether the last turn was over or cut.
                group.reasons.clear()

    def outdated(
        self, suite: SuiteName, version: Version, *, holds: bool
    ) -> Iterator[tuple[TrajectoryId, ...]]:
        """Give up evaluations of a suite that lost their instance and cannot go on under `version`;
        first say which responses those are. `holds`: whether that is sure to be what is held."""
        for (name, asked), each in list(self._in_progress.items()):
            if name != suite or each.instance is not None:
                continue
            if holds and asked == version and self._versions(each) <= {version}:
                continue
            groups, n = each.groups.values(), each.suite.suite.n
            yield tuple(TrajectoryId(group, member) for group in groups for member in range(n))
            for group in groups:
                self._in_flight.give_up(group, asked)
            del self._in_progress[name, asked]

    def begin(self, instance: InstanceId, suite: SuiteName, version: Version) -> list[Drawn]:
        """`instance` answers a suite's prompts; return those that are to become groups first."""
        evaluation = self._evaluation(suite, version)
        evaluation.instance = instance
        for group in evaluation.groups.values():
            self._begin_group(evaluation, group)
        rows = set(range(len(evaluation.suite.prompts)))
        missing = rows - evaluation.groups.keys() - evaluation.opening
        evaluation.opening |= missing
        return [self._in_flight.draw_for(suite, row, version) for row in sorted(missing)]

    def created(self, drawn: Drawn) -> None:
        """A prompt has become a group."""
        assert drawn.version is not None
        evaluation, row = self._in_progress.get((drawn.suite, drawn.version)), drawn.prompt.row
        if evaluation is None or row not in evaluation.opening:
            self._in_flight.give_up(drawn.group, drawn.version)
            return
        evaluation.opening.discard(row)
        evaluation.groups[row] = drawn.group
        self._begin_group(evaluation, drawn.group)

    def not_created(self, drawn: Drawn, error: str) -> Iterator[Evaluated]:
        """A prompt cannot become a group: none of its answers can be had."""
        assert drawn.version is not None
        evaluation = self._in_progress.get((drawn.suite, drawn.version))
        if evaluation is not None and drawn.prompt.row in evaluation.opening:
            evaluation.error = error
            for member in range(evaluation.suite.suite.n):
                evaluation.judged[drawn.prompt.row, member] = None
            evaluation.opening.discard(drawn.prompt.row)
            yield from self._report(evaluation)

    def observed(self, trajectory: TrajectoryId) -> None:
        """An environment answered: the policy's next turn comes."""
        evaluation = self._of(trajectory)
        if evaluation.instance is not None:
            self._generate(evaluation.instance, trajectory)

    def judged(
        self, trajectory: TrajectoryId, reward: float, last_turn: str
    ) -> Iterator[Evaluated]:
        """Receive what an answer is worth; `last_turn`: its text."""
        evaluation, group = self._of(trajectory), self._in_flight[trajectory.group]
        sampled = self._in_flight.num_stored(trajectory) - sum(
            end - start for start, end in self._in_flight.turns(trajectory)
        )
        vote = said(last_turn, evaluation.suite.suite.suite.answer_pattern)
        is_cut = group.reasons[trajectory.member] in CUT
        key = group.drawn.prompt.row, trajectory.member
        evaluation.judged[key] = Judged(reward, sampled, is_cut, vote)
        yield from self._report(evaluation)

    def failed(self, trajectory: TrajectoryId, error: str) -> Iterator[Evaluated]:
        """An answer cannot be had or judged."""
        evaluation = self._of(trajectory)
        evaluation.error = error
        row = self._in_flight[trajectory.group].drawn.prompt.row
        evaluation.judged[row, trajectory.member] = None
        yield from self._report(evaluation)

    def leave(self, instance: InstanceId) -> None:
        """An instance is gone."""
        for evaluation in self._in_progress.values():
            if evaluation.instance == instance:
                evaluation.instance = None

    def report(self, suite: SuiteName, version: Version) -> Iterator[Evaluated]:
        """Report an evaluation that was complete before it had an instance again."""
        if (evaluation := self._in_progress.get((suite, version))) is not None:
            yield from self._report(evaluation)

    def _report(self, evaluation: Evaluation) -> Iterator[Evaluated]:
        """Report an evaluation, if it is complete."""
        if len(evaluation.judged) < evaluation.num_answers or evaluation.instance is None:
            return
        suite, found = evaluation.suite.suite, evaluation.figures()
        (held,) = self._versions(evaluation) or {evaluation.asked}
        for group in evaluation.groups.values():
            self._in_flight.end(group)
            self._store.put_evaluated(group, held)
        del self._in_progress[suite.name, evaluation.asked]
        self._evaluated(held, suite.name, found, *filter(None, [evaluation.error]))
        mean = found.get(f"avg@{suite.n}")
        yield Evaluated(evaluation.instance, evaluation.asked, mean, suite.name, held)

    def _begin_group(self, evaluation: Evaluation, group_id: GroupId) -> None:
        """Have the answers generated that are not complete, nor up to their environment."""
        if evaluation.instance is None:
            return
        group = self._in_flight[group_id]
        row = group.drawn.prompt.row
        for member in range(evaluation.suite.suite.n):
            trajectory = TrajectoryId(group_id, member)
            is_over = member in group.reasons or (row, member) in evaluation.judged
            is_asked = group.turns_ended.get(member, 0) > len(self._in_flight.turns(trajectory))
            if not is_over and not is_asked:
                self._generate(evaluation.instance, trajectory)

    def _versions(self, evaluation: Evaluation) -> set[Version]:
        """What its answers so far are of."""
        groups = map(self._in_flight.__getitem__, evaluation.groups.values())
        return {version for group in groups for version in group.versions.values()}

    def _evaluation(self, suite: SuiteName, asked: Version) -> Evaluation:
        new = Evaluation(self.suites[suite], asked)
        return self._in_progress.setdefault((suite, asked), new)

    def _of(self, trajectory: TrajectoryId) -> Evaluation:
        drawn = self._in_flight[trajectory.group].drawn
        assert drawn.version is not None
        return self._in_progress[drawn.suite, drawn.version]
