"""Has an agent's programs run, and each of their calls answered by an instance.

A response is on one instance, which answers all its calls; one that comes meanwhile joins them.
When none is left its turn is over, and it waits for the program's next call or end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from rhymeflow.core import events
from rhymeflow.core.commands import Route
from rhymeflow.core.events import Event
from rhymeflow.core.types import InstanceId, TrajectoryId
from rhymeflow.environments.episode import Episode, TurnFigures
from rhymeflow.runtime.agent_calls import AgentCalls, RunningCall
from rhymeflow.runtime.environments import Environments, Reply, Stopped
from rhymeflow.runtime.in_flight import GroupInFlight, NotOpened
from rhymeflow.workers import messages


def continuation(
    group: GroupInFlight, turn: int, call: RunningCall | None
) -> messages.Continuation:
    """Return what an instance needs to answer a call; None: to say that it answers none."""
    drawn = group.drawn
    about = drawn.prompt.row, drawn.epoch
    if call is None:
        return messages.Continuation(*about, [], [], turn=turn, suite=drawn.suite)
    return messages.Continuation(
        *about,
        prompt_ids=call.prompt,
        tokens=[*call.asked, *call.said],
        turn=turn,
        turn_start=len(call.asked),
        suite=drawn.suite,
        branch=call.branch,
        until=call.made.until,
        row_prompt=group.prompt_ids,
        noise=call.noise,
    )


class Programs(Environments):
    """The environments of an agent."""

    has_agent = True

    # -- instances ----------------------------------------------------------------------------

    def continuations(self, route: Route) -> list[messages.Continuation]:
        """Return the calls that wait. If there are none, the instance says that the turn is over:
        the first time, so that the program begins."""
        calls = self._in_flight.routed(route.trajectory, route.version)
        calls.instance = route.instance
        waiting: list[RunningCall | None] = [*calls.running.values()] or [None]
        group = self._in_flight[route.trajectory.group]
        return [continuation(group, calls.turn + 1, call) for call in waiting]

    def generated(self, instance: InstanceId, part: messages.Part) -> None:
        """Take the next tokens of a turn; tell them to a program that reads them at once."""
        if part.trajectory in self._in_flight:
            calls, key = (
                self._in_flight.calls(part.trajectory),
                self._in_flight.name(part.trajectory),
            )
            if (grew := calls.take(key, instance, part)) is not None:
                self._supervisor.environments.send(grew)

    def stopped(self, event: Stopped) -> Stopped:
        """Note that a response is on no instance. Return the event with what is stored."""
        assert not isinstance(event, events.TrajectoryFinished), event
        trajectory = event.trajectory
        calls, length = self._in_flight.calls(trajectory), self._in_flight.num_stored(trajectory)
        calls.instance = None
        if isinstance(event, events.TrajectoryInterrupted):
            return replace(event, length=length)
        calls.turn, calls.is_waited_for = event.turn, True
        self._in_flight[trajectory.group].turns_ended[trajectory.member] = event.turn
        if event.turn == 1:
            room = self._in_flight.longest_prompt(self._in_flight[trajectory.group].drawn.suite)
            beginning, _ = self._episode(trajectory)
            self._ask(trajectory, messages.AskEnvironment(beginning, "answer", room))
        self._due.append(trajectory)
        observed = self._in_flight.num_observed(trajectory) - calls.num_observed
        calls.num_observed += observed
        return replace(event, length=length, observed=observed)

    def call_ended(self, message: messages.CallEnded) -> None:
        """Store a turn, and give it to the program."""
        answer = self._in_flight.end_call(message.trajectory, message.branch, message.reason)
        if answer is not None:
            self._supervisor.environments.send(answer)

    def due(self) -> Iterator[Event | NotOpened]:
        """Yield what programs did before the turns ended that have ended now."""
        while self._due:
            trajectory = self._due.popleft()
            if trajectory in self._in_flight:
                yield from self._go_on(trajectory, self._in_flight.calls(trajectory))

    # -- programs -----------------------------------------------------------------------------

    def take(
        self, message: Reply | messages.EpisodeFailed | messages.CallMade | messages.CallLeft
    ) -> Iterator[Event | NotOpened]:
        """Yield the events that follow from what a program does; see `Environments.take`."""
        subject, asked = self._asked.get(message.key, (None, None))
        if not isinstance(subject, TrajectoryId) or subject not in self._in_flight:
            return
        calls = self._in_flight.calls(subject)
        match message:
            case messages.CallMade():
                self._called(subject, calls, message)
            case messages.CallLeft(number=number):
                self._leave(subject, calls, calls.find(number))
            case messages.TurnAnswered() | messages.EpisodeFailed(is_lost=False) if (
                asked is not None and asked.wants == "answer"
            ):
                calls.ended = message
                self._leave(subject, calls, *calls.running.values())
            case _:
                self._leave(subject, calls, *calls.running.values())
                yield from super().take(message)
                return
        yield from self._go_on(subject, calls)

    def _go_on(self, trajectory: TrajectoryId, calls: AgentCalls) -> Iterator[Event | NotOpened]:
        """Yield that the program of a response that waits for it has called, or how it ended."""
        if not calls.is_waited_for or not (calls.ended or calls.running):
            return
        calls.is_waited_for = False
        if calls.ended is not None:
            yield from super().take(msgspec.structs.replace(calls.ended, turn=calls.turn))
            return
        length = self._in_flight.num_stored(trajectory)
        seconds, num_calls, num_failed = msgspec.structs.astuple(calls.figures)
        calls.figures = TurnFigures()
        yield events.Observed(trajectory, calls.turn, length, seconds, num_calls, num_failed)

    def _called(
        self, trajectory: TrajectoryId, calls: AgentCalls, message: messages.CallMade
    ) -> None:
        _, asked = self._asked[message.key]
        # If the worker is lost now, the program is too: it cannot begin again.
        episode = msgspec.structs.replace(asked.episode, turns=[[], []])
        self._asked[message.key] = trajectory, msgspec.structs.replace(asked, episode=episode)
        calls.add(message.figures)
        self._throughput.add_turn(message.figures)
        call = calls.begin(trajectory.member, self._in_flight.tokens(trajectory), message)
        asked_for = continuation(self._in_flight[trajectory.group], calls.turn + 1, call)
        self._tell(calls, messages.AskPolicy(trajectory, asked_for))

    def _leave(
        self, trajectory: TrajectoryId, calls: AgentCalls, *left: RunningCall | None
    ) -> None:
        """Stop the answers to calls. What a program has read of one that is streamed remains."""
        for call in filter(None, left):
            self._tell(calls, messages.DropCall(trajectory, call.branch))
            if not (call.made.is_streamed and call.parts):
                calls.drop(call)
                continue
            answer = self._in_flight.end_call(trajectory, call.branch, is_over=False)
            assert answer is not None, call
            self._supervisor.environments.send(answer)

    def _tell(self, calls: AgentCalls, message: messages.Message) -> None:
        """Send a message to the instance that answers a response's calls, if there is one."""
        instance = self._supervisor.instances.get(calls.instance or "")
        if instance is not None:
            instance.send(message)

    def _episode(self, trajectory: TrajectoryId) -> tuple[Episode, int]:
        """Return an episode whose program begins. Its turns are not told: it has had them."""
        drawn = self._in_flight[trajectory.group].drawn
        return drawn.episode(self._in_flight.name(trajectory), [[]], []), 0
