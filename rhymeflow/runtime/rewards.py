"""Sends complete responses to the reward worker, and turns its replies into events.

Functions per response get each response as it ends. Functions per group get the first
`num_generations` members that the functions per response have judged, and if that call fails, spare
members in the place of the failed. Of a suite's group they get all members; if that has one member
only, a single request calls all functions. See law 6."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from rhymeflow.config import Config
from rhymeflow.core.events import Event, RewardFailed, TrajectoryRewarded
from rhymeflow.core.types import GroupId, SuiteName, TrajectoryId, Version
from rhymeflow.errors import UserError
from rhymeflow.reward.components import WeightedSum
from rhymeflow.reward.messages import TrainerState
from rhymeflow.runtime.in_flight import InFlight
from rhymeflow.runtime.reporting import Reporter
from rhymeflow.runtime.supervisor import Supervisor
from rhymeflow.suites.suite import RUN, functions_of, of_run
from rhymeflow.utils.consecutive_failures import ConsecutiveFailures
from rhymeflow.workers import messages

if TYPE_CHECKING:
    from rhymeflow.store.writer import SqliteTrajectoryStore

Reply = messages.RewardComputed | messages.NoReward


class _Asked(NamedTuple):
    """A request to the reward worker: responses, and the rewards that each already has."""

    trajectories: list[TrajectoryId]
    components: list[dict[str, float]]
    is_group: bool  # whether they are judged together, as members of a group
    message: messages.ComputeReward


class _Judging(NamedTuple):
    """How responses of the run or of a suite are judged. Functions are indices into the reward
    worker's functions."""

    alone: tuple[int, ...]  # functions that are called with one response
    together: tuple[int, ...]  # functions that are called with `size` members of a group
    size: int
    sum: WeightedSum
    has_turns: bool
    stops: bool  # whether a reward function's failure ends the run

    @classmethod
    def of(cls, config: Config, run: Config, suite: SuiteName, size: int) -> _Judging:
        """Read it from the section `reward` of `config`, the configuration of `suite` in `run`."""
        functions, indices = config.reward.functions, tuple(functions_of(run, suite))
        indexed = list(zip(indices, functions, strict=True))
        alone = tuple(i for i, function in indexed if function.per == "response")
        together = tuple(i for i, function in indexed if function.per == "group")
        if suite != RUN and size == 1:
            alone, together = indices, ()
        total = WeightedSum(functions, config.environment.judges)
        stops = config.reward.on_failure == "stop"
        return cls(alone, together, size, total, config.environment.is_used, stops)


class Rewards:
    """The requests to the reward worker, and the events that follow from its replies."""

    def __init__(
        self,
        config: Config,
        supervisor: Supervisor,
        store: SqliteTrajectoryStore,
        in_flight: InFlight,
        reporter: Reporter,
        published: Version,
    ) -> None:
        self._supervisor, self._store, self._reporter = supervisor, store, reporter
        self._in_flight = in_flight
        self.published = published  # the version that reward functions see as the current step
        self._failures = ConsecutiveFailures(
            config.reward.max_consecutive_failures, "reward.max_consecutive_failures"
        )
        self._max_steps = max(1, config.learner.max_steps)  # functions may divide by it
        self._judging = {RUN: _Judging.of(config, config, RUN, config.rollout.num_generations)}
        for suite in of_run(config):
            self._judging[suite.name] = _Judging.of(suite.config, config, suite.name, suite.n)
        aggregation = config.learner.multi_objective_aggregation
        self._compares_components = aggregation == "normalize_then_sum"
        self._asked: dict[str, _Asked] = {}  # requests without a reply yet, by key

    def ask(self, trajectory: TrajectoryId, own: dict[str, float]) -> None:
        """Have a complete, stored response rewarded; `own` is its environment's reward, by name."""
        judging = self._judging_of(trajectory.group)
        # Even without functions the reward worker is asked: it decodes the response to text.
        if judging.alone or not judging.together:
            self._ask(self._in_flight.name(trajectory), [trajectory], [own], judging.alone)
        else:
            self._collect(trajectory, own)

    def take(self, message: Reply) -> Iterator[Event]:
        """Yield the events that follow from a reply. Raises `UserError` if there is no reward and
        `on_failure` is "stop", or if too many failed in a row."""
        trajectories, earlier, is_group, _ = self._asked.pop(message.key)
        group = trajectories[0].group
        self._failures.count(message.error if isinstance(message, messages.NoReward) else None)
        if isinstance(message, messages.RewardComputed):
            self._reporter.log(message, "eval/" if group < 0 else "")
        if trajectories[0] not in self._in_flight:
            return
        for trajectory, text in zip(trajectories, message.texts, strict=True):
            self._store.put_text(trajectory, text)
        if isinstance(message, messages.NoReward):
            for trajectory in trajectories:
                yield self._failed(trajectory, message.error)
            if is_group and trajectories[0] in self._in_flight:
                self._in_flight[group].is_judged = False
                self._judge(group)
            return
        pairs = zip(earlier, message.components, strict=True)
        components = [old | new for old, new in pairs]
        if self._judging_of(group).together and not is_group:
            self._collect(trajectories[0], components[0])
        else:
            yield from self._rewarded(message, trajectories, components)

    def ask_again(self) -> None:
        """Repeat all requests without a reply, to the worker that replaces a lost one."""
        for asked in self._asked.values():
            self._supervisor.rewards.send(asked.message)

    def leave_out(self, trajectory: TrajectoryId) -> None:
        """Judge a suite's group without an answer that could not be generated or judged."""
        self._in_flight[trajectory.group].failed.add(trajectory.member)
        self._judge(trajectory.group)

    # -- groups ------------------------------------------------------------------------------

    def _collect(self, trajectory: TrajectoryId, components: dict[str, float]) -> None:
        """Add a response to those that wait for the functions per group."""
        self._in_flight[trajectory.group].to_judge[trajectory.member] = components
        self._judge(trajectory.group)

    def _judge(self, group_id: GroupId) -> None:
        """Call the functions per group once enough members of the group wait for them."""
        group, judging = self._in_flight[group_id], self._judging_of(group_id)
        size = judging.size - len(group.failed)
        if group.is_judged or not group.to_judge or len(group.to_judge) < size:
            return
        group.is_judged = True
        members = sorted(islice(group.to_judge, size))
        trajectories = [TrajectoryId(group_id, member) for member in members]
        earlier = [group.to_judge.pop(member) for member in members]
        self._ask(group.drawn.name, trajectories, earlier, judging.together, is_group=True)

    # -- rewards -----------------------------------------------------------------------------

    def _rewarded(
        self,
        message: messages.RewardComputed,
        trajectories: list[TrajectoryId],
        components: Sequence[dict[str, float]],
    ) -> Iterator[Event]:
        """Yield each response's reward. If one of a training group's has none, all of them fail."""
        is_suite = trajectories[0].group < 0
        weighted_sum = self._judging_of(trajectories[0].group).sum
        weights = weighted_sum.weights
        rewards = [weighted_sum(each) for each in components]
        last_turns = message.last_turns or message.texts
        rows = zip(trajectories, components, rewards, last_turns, strict=True)
        for trajectory, each, reward, last_turn in rows:
            problem = weighted_sum.problem(message.key, [reward] if is_suite else rewards)
            if problem is not None:
                yield self._failed(trajectory, problem)
                continue
            assert reward is not None
            ordered = weighted_sum.ordered(each)
            self._store.put_reward(trajectory, reward=reward, components=ordered)
            compared = None
            if self._compares_components:  # each component within its group
                compared = {name: (weights[name], value) for name, value in ordered.items()}
            if is_suite:
                self._in_flight[trajectory.group].last_turns[trajectory.member] = last_turn
            yield TrajectoryRewarded(trajectory, reward, compared)

    def _failed(self, trajectory: TrajectoryId, error: str) -> RewardFailed:
        if self._judging_of(trajectory.group).stops:
            raise UserError(error)
        if trajectory.group < 0:
            self.leave_out(trajectory)
        return RewardFailed(trajectory, error)

    def _judging_of(self, group: GroupId) -> _Judging:
        return self._judging[self._in_flight[group].drawn.suite]

    def _ask(
        self,
        name: str,
        trajectories: list[TrajectoryId],
        earlier: list[dict[str, float]],
        functions: tuple[int, ...],
        *,
        is_group: bool = False,
    ) -> None:
        group, observations = self._in_flight[trajectories[0].group], []
        if self._judging[group.drawn.suite].has_turns:
            observations = [self._in_flight.observations(each) for each in trajectories]
        message = messages.ComputeReward(
            key=name,
            prompt=group.whole_prompt,
            responses=[self._in_flight.tokens(trajectory) for trajectory in trajectories],
            columns=group.drawn.prompt.columns,
            functions=functions,
            trainer_state=TrainerState(self.published, self._max_steps),
            observations=observations,
        )
        self._asked[name] = _Asked(trajectories, earlier, is_group, message)
        self._supervisor.rewards.send(message)
