"""Groups in flight: their prompts, and the tokens of their responses that are not stored yet.

Instances send tokens several times a second, so that little is lost with an instance. A response's
new tokens are stored as a segment about every second, and whenever the response stops or another
version or instance continues it. Tokens of responses that are over are ignored.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from rhymeflow.core.events import GroupCreated
from rhymeflow.core.types import (
    HELD_OUT,
    FinishReason,
    GroupId,
    InstanceId,
    SuiteName,
    TrajectoryId,
    Version,
)
from rhymeflow.data.encode import PromptEncoder
from rhymeflow.data.load import RunPrompts
from rhymeflow.data.prompts import Message, Prompt, opened, opening_of
from rhymeflow.environments.episode import Episode
from rhymeflow.errors import UserError
from rhymeflow.histospec.noise_sharing import EVALUATION_EPOCH
from rhymeflow.runtime.agent_calls import AgentCalls
from rhymeflow.suites.suite import RUN, SuitePrompts
from rhymeflow.workers.messages import AnswerCall, Continuation, Part

if TYPE_CHECKING:
    from rhymeflow.store.writer import SqliteTrajectoryStore


class Drawn(NamedTuple):
    """A prompt taken from the data, and the number that its group will have."""

    group: GroupId
    epoch: int
    prompt: Prompt
    repeats: GroupId | None = None  # the ended group whose prompt is retried
    suite: SuiteName = RUN
    version: Version | None = None
    """For a suite's prompt: the version that is evaluated."""

    def episode(
        self, key: str, turns: list[list[int]], observed: list[list[int]], opening: str = ""
    ) -> Episode:
        """Return an episode with this prompt; see `Episode` for the arguments."""
        about = self.prompt.row, self.epoch, self.prompt.prompt, self.prompt.columns
        return Episode(key, *about, turns, observed, opening, self.suite)

    @property
    def name(self) -> str:
        """The group's name in requests and in messages to the user."""
        if self.suite == RUN:
            return f"group {self.group}"
        row = "held-out row" if self.suite == HELD_OUT else f"suite {self.suite}, row"
        return f"{row} {self.prompt.row} at version {self.version} (group {self.group} in the log)"


class NotOpened(NamedTuple):
    """A prompt that cannot become a group because its environment failed."""

    drawn: Drawn
    error: str


class Unstored(NamedTuple):
    """The newest tokens of a response, from one instance and under one version; not stored yet."""

    instance: InstanceId
    parts: list[Part]


@dataclass(slots=True)
class GroupInFlight:
    """A group's prompt and the state of its members (its responses, by number)."""

    drawn: Drawn
    opening: str
    """Text that the environment put after the prompt; see `whole_prompt`."""
    prompt_ids: list[int]
    open: dict[int, Unstored] = field(default_factory=dict)
    """Members with tokens that are not stored yet."""
    stored: dict[int, array[int]] = field(default_factory=dict)
    """Stored tokens of each member that has any."""
    versions: dict[int, Version] = field(default_factory=dict)
    """The version that generated a member's last stored token."""
    observations: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """The start and end, in tokens, of each observation in a member's response."""
    calls: dict[int, AgentCalls] = field(default_factory=dict)
    """Of an agent: each member's, once it was routed."""
    turns_ended: dict[int, int] = field(default_factory=dict)
    """How many of the policy's turns have ended, for members with turns."""
    reasons: dict[int, FinishReason] = field(default_factory=dict)  # of complete members
    aborted: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    """Members of a suite's group that could not be generated or judged."""
    last_turns: dict[int, str] = field(default_factory=dict)
    """The text of the last turn of each judged member of a suite's group."""
    to_judge: dict[int, dict[str, float]] = field(default_factory=dict)
    """Members that wait for the group's reward functions, in order, with their own rewards."""
    is_judged: bool = False
    """Whether the group's reward functions were called, and have not failed."""

    @property
    def whole_prompt(self) -> str | list[Message]:
        """The prompt as the policy gets it."""
        return opened(self.drawn.prompt.prompt, self.opening)


class InFlight:
    """The groups in flight, from the request of their prompt to their end."""

    def __init__(
        self,
        store: SqliteTrajectoryStore,
        prompts: RunPrompts,
        suites: Mapping[SuiteName, SuitePrompts] = MappingProxyType({}),
        *,
        has_agent: bool = False,
    ) -> None:
        self._store, self._prompts, self._suites = store, prompts, suites
        self._has_agent = has_agent
        self._groups: dict[GroupId, GroupInFlight] = {}
        self._next_group_id: GroupId = 0
        self._last_suite_group: GroupId = 0  # groups of suites are numbered downwards from -1
        self.num_drawn = 0  # from the stream; a retried prompt does not count
        self.suite_groups: dict[GroupId, tuple[SuiteName, Version]] = {}
        """Suites' groups that were in flight when the earlier attempt ended."""

    def __getitem__(self, group: GroupId) -> GroupInFlight:
        return self._groups[group]

    def __contains__(self, trajectory: TrajectoryId) -> bool:
        """Whether this response is still needed."""
        group = self._groups.get(trajectory.group)
        return group is not None and trajectory.member not in group.aborted

    # -- groups ------------------------------------------------------------------------------

    def name(self, trajectory: TrajectoryId) -> str:
        """Return a response's name in requests and in messages to the user."""
        drawn = self._groups[trajectory.group].drawn
        if drawn.suite == RUN:
            return f"trajectory {trajectory}"
        return f"answer {trajectory.member} to {drawn.name}"

    def begin_at(self, next_group: GroupId, num_drawn: int, published: Version) -> None:
        """Continue an earlier attempt, which took `num_drawn` prompts from the data.

        Groups from `next_group` on are stored but not in the log: they are deleted and drawn again.
        Suites' groups end unless they evaluate version `published`: other weights are gone. So are
        the programs of an agent, which answer those prompts from the beginning.
        """
        self._next_group_id, self.num_drawn = next_group, num_drawn
        self._store.forget_groups(next_group)
        self._last_suite_group, in_flight = self._store.suite_groups()
        self.suite_groups = {}
        for group, (suite, version) in in_flight.items():
            if suite in self._suites and version == published and not self._has_agent:
                self.suite_groups[group] = suite, version
            else:
                self.give_up(group, published)

    def restore(self, aborted: Mapping[GroupId, Iterable[int]]) -> None:
        """Restore stored groups: `suite_groups`, and the keys of `aborted`, whose values are the
        groups' aborted members. Raises `UserError` if a prompt has changed or is not stored."""
        aborted = {**aborted, **dict.fromkeys(self.suite_groups, ())}
        progress = self._store.progress(aborted)
        if lost := aborted.keys() - progress.keys():
            raise UserError(f"cannot be resumed: the log has group {min(lost)}, but not its prompt")
        for group_id, members in aborted.items():
            stored = progress[group_id]
            row = stored.row
            suite, evaluates = self.suite_groups.get(group_id, (RUN, None))
            prompts = self._prompts.train if suite == RUN else self._suites[suite].prompts
            prompt = prompts[row] if row < len(prompts) else None
            opening = None if prompt is None else opening_of(prompt.prompt, stored.prompt)
            ids: list[int] = []
            if prompt is not None and opening is not None:
                ids = self._encoded(prompt, opening, suite)
                if self._encoder(suite).writes_date:
                    ids = stored.prompt_ids  # as it began; the same rows were found before
            if prompt is None or opening is None or ids != stored.prompt_ids:
                what = "data.source" if suite == RUN else f"eval.suites: {suite}"
                raise UserError(
                    f"{what}: row {row} is not what it was when group {group_id} was made of "
                    "it; a run can be resumed only with the data that it began with"
                )
            self._groups[group_id] = GroupInFlight(
                Drawn(group_id, stored.epoch, prompt, None, suite, evaluates),
                opening,
                ids,
                stored=stored.tokens,
                versions=stored.versions,
                observations=stored.observations,
                reasons=stored.finished,
                aborted={*members},
            )

    def draw(self) -> Drawn:
        """Take the next prompt of the stream."""
        epoch, prompt = self._prompts.stream.at(self.num_drawn)
        self.num_drawn += 1
        self._next_group_id += 1
        return Drawn(self._next_group_id - 1, epoch, prompt)

    def draw_for(self, suite: SuiteName, row: int, version: Version) -> Drawn:
        """Take the prompt at `row` of a suite, to evaluate `version`."""
        self._last_suite_group -= 1
        prompt = self._suites[suite].prompts[row]
        return Drawn(self._last_suite_group, EVALUATION_EPOCH, prompt, None, suite, version)

    def draw_again(self, group: GroupId) -> Drawn:
        """Take the prompt of an ended group for a new one. Row and epoch are the same, and so is
        the noise: with fresh noise, retries would favour short responses."""
        row, epoch = self._store.origin(group)
        self._next_group_id += 1
        return Drawn(self._next_group_id - 1, epoch, self._prompts.train[row], group)

    def add(self, drawn: Drawn, opening: str = "") -> GroupCreated:
        """Store a prompt with its environment's opening as a new group."""
        prompt, ids = drawn.prompt, self._encoded(drawn.prompt, opening, drawn.suite)
        group = GroupInFlight(drawn, opening, ids)
        self._groups[drawn.group] = group
        self._store.put_group(
            drawn.group,
            row=prompt.row,
            epoch=drawn.epoch,
            prompt=group.whole_prompt,
            prompt_tokens=ids,
            columns=prompt.columns,
            suite=drawn.suite or None,
            version=drawn.version,
        )
        return GroupCreated(drawn.group, prompt.row, drawn.epoch, len(ids), drawn.repeats)

    def _encoded(self, prompt: Prompt, opening: str, suite: SuiteName) -> list[int]:
        if suite != RUN and not opening:
            return self._suites[suite].prompt_ids[prompt.row]
        if opening:
            prompt = replace(prompt, prompt=opened(prompt.prompt, opening))
        return self._encoder(suite).encode(prompt)

    def longest_prompt(self, suite: SuiteName) -> int:
        """Return the most tokens of a prompt of a suite or the run."""
        return self._encoder(suite).most_tokens

    def _encoder(self, suite: SuiteName) -> PromptEncoder:
        return (self._prompts if suite == RUN else self._suites[suite]).encoder

    def give_up(self, group: GroupId, version: Version) -> None:
        """End a suite's group whose evaluation of `version` does not continue."""
        if group in self._groups:
            self.end(group)
        reason = "its evaluation was given up"
        self._store.put_ending(group, "aborted", version=version, reason=reason)

    def end(self, group: GroupId) -> None:
        """Store what a group has and forget it."""
        for member in list(self._groups[group].open):
            self.seal(TrajectoryId(group, member))
        del self._groups[group]

    # -- responses ---------------------------------------------------------------------------

    def take(self, instance: InstanceId, part: Part) -> None:
        """Take the next tokens of a response; those of one that is over are dropped. An agent's
        are `AgentCalls`' to take."""
        if part.trajectory not in self:
            return
        open_members, member = self._groups[part.trajectory.group].open, part.trajectory.member
        if member in open_members and open_members[member].parts[0].version != part.version:
            self.seal(part.trajectory)
        if member not in open_members:
            assert part.start == self.num_stored(part.trajectory), (instance, part)
            open_members[member] = Unstored(instance, [part])
            return
        holder, parts = open_members[member]
        assert holder == instance, (holder, instance, part.trajectory)
        assert part.start == parts[-1].start + len(parts[-1].tokens), (instance, part)
        parts.append(part)

    def seal(self, trajectory: TrajectoryId) -> int:
        """Store a response's open parts as a segment; return its length in tokens."""
        group, member = self._groups[trajectory.group], trajectory.member
        if member in group.open:
            self._put(trajectory, *group.open.pop(member))
        return self.num_stored(trajectory)

    def _put(self, trajectory: TrajectoryId, instance: InstanceId, parts: list[Part]) -> None:
        """Store parts of one instance and version as the response's next segment."""
        group, member = self._groups[trajectory.group], trajectory.member
        tokens = list(chain.from_iterable(part.tokens for part in parts))
        self._store.put_segment(
            trajectory,
            start=self.num_stored(trajectory),
            version=parts[0].version,
            instance=instance,
            steps=sum(part.steps for part in parts),
            drafted=sum(part.drafted for part in parts),
            tokens=tokens,
            logprobs=list(chain.from_iterable(part.logprobs for part in parts)),
            accepted=b"".join(part.accepted for part in parts) or None,
        )
        group.stored.setdefault(member, array("i")).extend(tokens)
        group.versions[member] = parts[0].version

    def observe(
        self, trajectory: TrajectoryId, tokens: list[int], follows: int | None = None
    ) -> int:
        """Store an environment's observation, or an agent's call that `follows` a turn; return the
        response's length in tokens."""
        group, member = self._groups[trajectory.group], trajectory.member
        assert member not in group.open, f"{trajectory} is being generated"
        stored, version = group.stored.setdefault(member, array("i")), group.versions.get(member)
        if version is None:  # nothing is before an agent's first call
            version = group.calls[member].v_traj
        start = len(stored)
        self._store.put_observed(
            trajectory, start=start, version=version, tokens=tokens, follows=follows
        )
        stored.extend(tokens)
        group.observations.setdefault(member, []).append((start, len(stored)))
        return len(stored)

    def num_observed(self, trajectory: TrajectoryId) -> int:
        """Return how many of a response's tokens are observations."""
        return sum(end - start for start, end in self.observations(trajectory))

    def observations(self, trajectory: TrajectoryId) -> list[tuple[int, int]]:
        """Return the start and end, in tokens, of each observation in a response."""
        return self._groups[trajectory.group].observations.get(trajectory.member, [])

    def waits_for_environment(self, trajectory: TrajectoryId) -> bool:
        """Whether the policy's last turn is not answered."""
        group, member = self._groups[trajectory.group], trajectory.member
        if self._has_agent:
            return member in group.calls and group.calls[member].is_waited_for
        return self.turns_ended(trajectory) > len(self.observations(trajectory))

    def turns_ended(self, trajectory: TrajectoryId) -> int:
        """Return how many of the policy's turns have ended."""
        group = self._groups.get(trajectory.group)
        return 0 if group is None else group.turns_ended.get(trajectory.member, 0)

    def complete(self, trajectory: TrajectoryId, reason: FinishReason) -> int:
        """Store that a response is complete as it is; return its length in tokens."""
        length = self.seal(trajectory)
        self._store.put_finished(trajectory, length=length, reason=reason)
        self._groups[trajectory.group].reasons[trajectory.member] = reason
        return length

    def seal_all(self, instance: InstanceId | None = None) -> list[tuple[TrajectoryId, int]]:
        """Store the open parts of all responses, or of one instance's; return their lengths. An
        agent's calls enter a response once they are answered; one instance's are nowhere now."""
        for group in self._groups.values():
            for calls in group.calls.values():
                if calls.instance == instance:
                    calls.instance = None
        chosen = [
            TrajectoryId(group_id, member)
            for group_id, group in self._groups.items()
            for member, unstored in group.open.items()
            if instance in (None, unstored.instance)
        ]
        return [(trajectory, self.seal(trajectory)) for trajectory in chosen]

    def tokens(self, trajectory: TrajectoryId) -> list[int]:
        """Return the response so far; all of it must be stored."""
        group = self._groups[trajectory.group]
        assert trajectory.member not in group.open, f"{trajectory} is being generated"
        stored = group.stored.get(trajectory.member)
        return [] if stored is None else stored.tolist()

    def continuation(self, trajectory: TrajectoryId) -> Continuation:
        """Return what an instance needs to continue a response."""
        group, observations = self._groups[trajectory.group], self.observations(trajectory)
        return Continuation(
            row=group.drawn.prompt.row,
            epoch=group.drawn.epoch,
            prompt_ids=group.prompt_ids,
            tokens=self.tokens(trajectory),
            turn=len(observations) + 1,
            turn_start=observations[-1][1] if observations else 0,
            suite=group.drawn.suite,
        )

    # -- an agent's calls --------------------------------------------------------------------

    def routed(self, trajectory: TrajectoryId, version: Version) -> AgentCalls:
        """Return the calls of a response that is routed at `version`."""
        calls = self._groups[trajectory.group].calls
        return calls.setdefault(trajectory.member, AgentCalls(version))

    def calls(self, trajectory: TrajectoryId) -> AgentCalls:
        """Return the calls of a response that was routed."""
        return self._groups[trajectory.group].calls[trajectory.member]

    def end_call(
        self,
        trajectory: TrajectoryId,
        branch: int,
        reason: Literal["stop", "length"] = "length",
        *,
        is_over: bool = True,
    ) -> AnswerCall | None:
        """Store a call with the turn that answers it; None: it was dropped, or nothing was said.
        `is_over`: nothing more of it can come from an instance."""
        calls = self.calls(trajectory)
        call = calls.running.get(branch)
        if call is None or not call.parts:
            return None
        start = self.num_stored(trajectory)
        self.observe(trajectory, call.made.tokens, call.made.follows)
        for instance, parts in call.segments():
            self._put(trajectory, instance, parts)
        end = self.num_stored(trajectory)
        calls.end(branch, start, end, is_free=is_over)
        logprobs = [each for _, part in call.parts for each in part.logprobs]
        about = self.name(trajectory), call.made.number
        return AnswerCall(*about, call.said, logprobs, end, reason)

    def abort(self, trajectory: TrajectoryId) -> None:
        """Store what there is of a response that is no longer needed."""
        if trajectory in self:
            self.seal(trajectory)
            calls = self._groups[trajectory.group].calls.get(trajectory.member)
            for branch in [*calls.running] if calls else []:
                self.end_call(trajectory, branch)
            self._groups[trajectory.group].aborted.add(trajectory.member)

    def num_stored(self, trajectory: TrajectoryId) -> int:
        """Return how many of a response's tokens are stored."""
        return len(self._groups[trajectory.group].stored.get(trajectory.member, ()))
