"""An environment worker whose programs call at random: at once, in any order, some in vain; and
what must hold of the responses that come of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rhymeflow.config import Config
from rhymeflow.engine.base import NoiseKey
from rhymeflow.environments.episode import Until
from rhymeflow.runtime.agent_calls import noise_of
from rhymeflow.store.branches import Asked, stretches
from rhymeflow.workers import messages
from rhymeflow.workers.channel import Channel
from rhymeflow.workers.messages import Message, receive, send
from tests.fake_run import models
from tests.fake_run.world import World

ACTS = 0.3
"""Probability that a program does something when it is this worker's turn."""
MOST_CALLS, MOST_IN_VAIN = 6, 20
"""Calls of a program, after which it ends if one was answered, or else fails."""
WORDS = ([7], [8, 0], [9, 9, 9])
"""What programs ask: some of it would end a turn."""


@dataclass
class Program:
    waits: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By number of a call: how many tokens follow its sequence's prompt, and how many it wants."""
    ends: dict[int, int] = field(default_factory=dict)
    """By the end of a turn: how many tokens follow its sequence's prompt."""
    grown: dict[int, list[int]] = field(default_factory=dict)
    """By number of a call that is streamed: what was read of its turn."""
    left: set[int] = field(default_factory=set)
    """Those that were read in part, which still are to become turns."""
    num_calls: int = 0
    has_ended: bool = False


class FakePrograms:
    """An environment worker; so many of the programs fail."""

    def __init__(self, connection: Channel, config: Config, world: World, failures: float) -> None:
        self._connection, self._world, self._failures = connection, world, failures
        self._most = config.rollout.max_completion_length
        self._programs: dict[str, Program] = {}

    def turn(self) -> None:
        while self._connection.poll(0.0):
            message = receive(self._connection)
            match message:
                case messages.CloseEpisodes(keys=keys):
                    for key in keys:
                        self._programs.pop(key, None)
                case messages.AnswerCall(key=key) if key in self._programs:
                    self._answered(self._programs[key], message)
                case messages.TurnGrew(key=key, number=number) if key in self._programs:
                    self._programs[key].grown[number] += message.tokens
                case messages.AskEnvironment():
                    self._asked(message)
        for key, program in list(self._programs.items()):
            if not program.has_ended and self._world.chance(ACTS):
                send(self._connection, self._act(key, program))
        if self._world.chance(0.3):
            send(self._connection, messages.Alive())

    def _asked(self, message: messages.AskEnvironment) -> None:
        key = message.episode.key
        if message.wants == "answer" and message.episode.turns == [[]]:
            self._programs[key] = Program()
        elif message.wants == "reward" and key in self._programs:
            program = self._programs.pop(key)
            assert program.has_ended
            assert not program.left
            send(
                self._connection,
                messages.EpisodeJudged(key, {"agent": self._world.rng.choice([0.0, 1.0])}),
            )
        else:
            assert key not in self._programs, f"the program of {key} runs"
            send(self._connection, messages.EpisodeFailed(key, 0, f"{key}: lost", is_lost=True))

    def _answered(self, program: Program, message: messages.AnswerCall) -> None:
        before, most = program.waits.pop(message.number, (0, self._most))
        read = program.grown.pop(message.number, [])
        assert message.tokens[: len(read)] == read
        program.left.discard(message.number)
        assert 0 < len(message.tokens) == len(message.logprobs) <= most
        assert models.STOP not in message.tokens[:-1]
        program.ends[message.end] = before + len(message.tokens)

    def _act(self, key: str, program: Program) -> Message:
        choose = self._world.rng.choice
        if self._world.chance(self._failures):
            program.has_ended = True
            self._world.counts["environment failed"] += 1
            return messages.EpisodeFailed(key, 0, f"{key}: broken")
        if program.waits and self._world.chance(0.05):
            self._world.counts["call dropped"] += 1
            number = choose([*program.waits])
            if program.grown.get(number):  # what was read is a turn
                program.left.add(number)
            else:
                del program.waits[number]
            return messages.CallLeft(key, number)
        is_done = program.num_calls >= MOST_CALLS or self._world.chance(0.2)
        if program.ends and is_done:
            program.has_ended = True
            return messages.TurnAnswered(key, 0, "stop", messages.TurnFigures())
        if program.num_calls >= MOST_IN_VAIN:  # all were dropped
            program.has_ended = True
            return messages.EpisodeFailed(key, 0, f"{key}: nothing was answered")
        words = choose(WORDS)
        follows = choose([0, *(e for e, n in program.ends.items() if n + len(words) < self._most)])
        before = program.ends[follows] + len(words) if follows else 0
        number, program.num_calls = program.num_calls, program.num_calls + 1
        wanted = choose([None, 1, 3])
        program.waits[number] = before, wanted or self._most
        if is_streamed := self._world.chance(0.5):
            program.grown[number] = []
        return messages.CallMade(
            key, number, list(words), follows, Until(wanted), messages.TurnFigures(), is_streamed
        )


def check_response(tokens: list[int], calls: list[Asked], origin: NoiseKey, most: int) -> None:
    """Each turn is what the noise gives of one who asks this, for one of the times."""
    row, epoch, member = origin
    ends = [*(call.start for call in calls[1:]), len(tokens)]
    assert calls[0].start == 0, "a response begins with a call"
    for call, end in zip(calls, ends, strict=True):
        asked = [token for a, b in stretches(calls, call.end) for token in tokens[a:b]]
        first, _ = stretches(calls, call.end)[0]
        position = len(asked) - next(each.end - each.start for each in calls if each.start == first)
        turn = tokens[call.end : end]
        assert turn
        assert position + len(turn) <= most
        keys = [
            NoiseKey(row, epoch, noise_of(member, asked, times)) for times in range(MOST_IN_VAIN)
        ]
        due = [[models.token(key, position + each) for each in range(len(turn))] for key in keys]
        assert turn in due, "a turn is not that of its call"
