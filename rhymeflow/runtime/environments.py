"""Has the environment worker open prompts, answer the policy's turns and judge responses.

Each request holds the whole episode, so a lost worker loses nothing. An opening is text that an
environment adds to the prompt of a whole group. Groups are created in the order of their prompts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from rhymeflow.config import Config
from rhymeflow.core import events
from rhymeflow.core.commands import Route
from rhymeflow.core.events import Event, GroupCreated
from rhymeflow.core.types import FinishReason, GroupId, InstanceId, SuiteName, TrajectoryId
from rhymeflow.environments.episode import Episode
from rhymeflow.errors import UserError
from rhymeflow.runtime.in_flight import Drawn, InFlight, NotOpened
from rhymeflow.runtime.rewards import Rewards
from rhymeflow.runtime.supervisor import Supervisor
from rhymeflow.runtime.throughput import Throughput
from rhymeflow.suites.suite import RUN, of_run
from rhymeflow.utils.consecutive_failures import ConsecutiveFailures
from rhymeflow.workers import messages

Reply = messages.EpisodeOpened | messages.TurnAnswered | messages.EpisodeJudged
REPLIES: Mapping[str, type[Reply]] = {
    "opening": messages.EpisodeOpened,
    "answer": messages.TurnAnswered,
    "reward": messages.EpisodeJudged,
}
"""The reply to each kind of request, unless the environment fails."""

Stopped = events.TrajectoryFinished | events.TurnEnded | events.TrajectoryInterrupted
"""What an instance says that has stopped generating a response."""


class Environments:
    """Sends requests to the environment worker, and turns its replies into events."""

    has_agent = False

    def __init__(
        self,
        config: Config,
        supervisor: Supervisor,
        in_flight: InFlight,
        rewards: Rewards,
        throughput: Throughput,
    ) -> None:
        self._supervisor, self._throughput = supervisor, throughput
        self._in_flight, self._rewards = in_flight, rewards
        self._failures = ConsecutiveFailures(
            config.environment.max_consecutive_failures, "environment.max_consecutive_failures"
        )
        self._configs: dict[SuiteName, Config] = {RUN: config} | {
            suite.name: suite.config for suite in of_run(config)
        }
        self._asked: dict[str, tuple[TrajectoryId | Drawn, messages.AskEnvironment]] = {}
        """Requests without a reply yet, by key; each with the response or prompt it is for."""
        self._pending: dict[GroupId, tuple[Drawn, str | None]] = {}
        """Training prompts that are not groups yet, in the order in which they were drawn; each has
        its opening, or None while that has not arrived."""
        self._due: deque[TrajectoryId] = deque()
        """Responses of an agent whose turn is over, for `due`."""

    # -- groups -------------------------------------------------------------------------------

    def request(self, drawn: Drawn) -> Iterator[GroupCreated]:
        """Request a prompt's opening; yield its group at once if it needs none."""
        if self.has_agent or not self._configs[drawn.suite].environment.classes:
            yield self._in_flight.add(drawn)
            return
        if drawn.suite == RUN:
            self._pending[drawn.group] = drawn, None
        self._ask(drawn, messages.AskEnvironment(drawn.episode(drawn.name, [], []), "opening"))

    def _opened(self, drawn: Drawn, opening: str) -> Iterator[GroupCreated]:
        if drawn.suite != RUN:
            yield self._in_flight.add(drawn, opening)
            return
        self._pending[drawn.group] = drawn, opening
        for group, (earliest, its_opening) in list(self._pending.items()):
            if its_opening is None:
                return  # later groups wait for this one
            del self._pending[group]
            yield self._in_flight.add(earliest, its_opening)

    # -- responses ----------------------------------------------------------------------------

    def continuations(self, route: Route) -> list[messages.Continuation]:
        """Return what the instance needs to continue a response."""
        return [self._in_flight.continuation(route.trajectory)]

    def generated(self, instance: InstanceId, part: messages.Part) -> None:
        """Take the next tokens of a response."""
        self._in_flight.take(instance, part)

    def stopped(self, event: Stopped) -> Stopped:
        """Store a response that its instance has stopped generating, and request what follows.
        Return the event as the coordinator gets it."""
        if isinstance(event, events.TrajectoryFinished):
            length = self.finished(event.trajectory, event.reason)
        else:
            length = self._in_flight.seal(event.trajectory)
        assert length == event.length, (event, length)
        if isinstance(event, events.TurnEnded):
            self.turn_ended(event.trajectory)
        return event

    def call_ended(self, message: messages.CallEnded) -> None:
        """Take that an agent's call is answered."""
        raise AssertionError("there is no agent")

    def due(self) -> Iterable[Event | NotOpened]:
        """Return the events that follow from what instances have said."""
        return ()

    def turn_ended(self, trajectory: TrajectoryId) -> None:
        """Request the observation that follows the policy's last turn, whose tokens are stored."""
        group = self._in_flight[trajectory.group]
        num_observations = len(self._in_flight.observations(trajectory))
        group.turns_ended[trajectory.member] = num_observations + 1
        episode, length = self._episode(trajectory)
        config = self._config(trajectory)
        room = config.rollout.max_completion_length - length - 1  # one token for the next turn
        self._ask(trajectory, messages.AskEnvironment(episode, "answer", room))

    def finished(self, trajectory: TrajectoryId, reason: FinishReason) -> int:
        """Store that a response is complete and have it rewarded; return its length in tokens."""
        length = self._in_flight.complete(trajectory, reason)
        self.judge(trajectory)
        return length

    def judge(self, trajectory: TrajectoryId) -> None:
        """Have a complete response rewarded by its environment and then by reward functions."""
        if self._config(trajectory).environment.judges:
            episode, _ = self._episode(trajectory)
            self._ask(trajectory, messages.AskEnvironment(episode, "reward"))
        else:
            self.close([trajectory])
            self._rewards.ask(trajectory, {})

    def close(self, trajectories: Iterable[TrajectoryId]) -> None:
        """Close the environments of these responses."""
        begun = (t for t in trajectories if self._in_flight.turns_ended(t))
        self._close([self._in_flight.name(trajectory) for trajectory in begun])

    def _close(self, keys: list[str]) -> None:
        if keys:
            for key in keys:
                self._asked.pop(key, None)
            self._supervisor.environments.send(messages.CloseEpisodes(keys))

    def ask_again(self) -> None:
        """Repeat all requests without a reply, to the worker that replaces a lost one."""
        for _, message in self._asked.values():
            self._supervisor.environments.send(message)

    # -- replies ------------------------------------------------------------------------------

    def take(self, message: Reply | messages.EpisodeFailed) -> Iterator[Event | NotOpened]:
        """Yield the events that follow from a reply. Raises `UserError` if an environment failed
        and `on_failure` is "stop", or if too many failed in a row."""
        if message.key not in self._asked:
            return  # it was closed
        subject, asked = self._asked[message.key]
        if not isinstance(message, (REPLIES[asked.wants], messages.EpisodeFailed)):
            return  # it replies to an earlier request, which was withdrawn
        del self._asked[message.key]
        if isinstance(subject, TrajectoryId) and subject not in self._in_flight:
            return
        if isinstance(message, messages.EpisodeFailed) and message.is_lost:
            assert isinstance(subject, TrajectoryId)
            yield self._lost(subject, message)
            return
        error = message.error if isinstance(message, messages.EpisodeFailed) else None
        self._failures.count(error)
        match subject, message:
            case _, messages.EpisodeFailed():
                yield self._failed(subject, message, wants=asked.wants)
            case Drawn() as drawn, messages.EpisodeOpened(key=key, opening=opening):
                self._close([key])  # each response of the group gets a new environment
                yield from self._opened(drawn, opening)
            case TrajectoryId() as trajectory, messages.EpisodeJudged(rewards=rewards):
                self._rewards.ask(trajectory, rewards)
            case TrajectoryId() as trajectory, messages.TurnAnswered():
                yield from self._answered(trajectory, message)

    def _answered(
        self, trajectory: TrajectoryId, message: messages.TurnAnswered
    ) -> Iterator[Event]:
        figures, answer = message.figures, message.answer
        self._throughput.add_turn(figures)
        costs = figures.seconds, figures.calls, figures.failed_calls
        if isinstance(answer, str):  # the reason why the episode has ended
            self.finished(trajectory, answer)
            yield events.EpisodeEnded(trajectory, message.turn, answer, *costs)
            return
        length = self._in_flight.observe(trajectory, answer)
        yield events.Observed(trajectory, message.turn, length, *costs)

    def _failed(
        self, subject: TrajectoryId | Drawn, message: messages.EpisodeFailed, *, wants: str
    ) -> Event | NotOpened:
        drawn = subject if isinstance(subject, Drawn) else self._in_flight[subject.group].drawn
        # Without its opening a training prompt cannot become a group, not even one to drop.
        is_fatal = drawn is subject and drawn.suite == RUN
        if is_fatal or self._configs[drawn.suite].environment.on_failure == "stop":
            raise UserError(message.error)
        if isinstance(subject, Drawn):
            return NotOpened(subject, message.error)
        if subject.group < 0:  # for other groups the coordinator commands it
            self._leave_out(subject, message)
        if wants == "reward":
            return events.RewardFailed(subject, message.error)
        return events.EnvironmentFailed(subject, message.turn, message.error)

    def _lost(self, trajectory: TrajectoryId, message: messages.EpisodeFailed) -> Event:
        """Return the event of a program that is gone; an answer to a suite's prompt has failed."""
        if trajectory.group >= 0:
            return events.ProgramLost(trajectory, message.error)
        self._leave_out(trajectory, message)
        return events.EnvironmentFailed(trajectory, message.turn, message.error)

    def _leave_out(self, trajectory: TrajectoryId, message: messages.EpisodeFailed) -> None:
        self._close([message.key])
        self._rewards.leave_out(trajectory)

    # -- requests -----------------------------------------------------------------------------

    def _ask(self, subject: TrajectoryId | Drawn, message: messages.AskEnvironment) -> None:
        key = message.episode.key
        if key in self._asked:  # the response was finished early while it waited for an observation
            self._close([key])
        self._asked[key] = subject, message
        self._supervisor.environments.send(message)

    def _episode(self, trajectory: TrajectoryId) -> tuple[Episode, int]:
        """Return a response's episode, and its length in tokens."""
        group = self._in_flight[trajectory.group]
        tokens = self._in_flight.tokens(trajectory)
        observations = self._in_flight.observations(trajectory)
        turn_starts = [0, *(end for _, end in observations)]
        turn_ends = [start for start, _ in observations]
        if self._in_flight.turns_ended(trajectory) > len(observations):
            turn_ends.append(len(tokens))
        turns = [tokens[start:end] for start, end in zip(turn_starts, turn_ends, strict=False)]
        observed = [tokens[start:end] for start, end in observations]
        name = self._in_flight.name(trajectory)
        return group.drawn.episode(name, turns, observed, group.opening), len(tokens)

    def _config(self, trajectory: TrajectoryId) -> Config:
        return self._configs[self._in_flight[trajectory.group].drawn.suite]
