"""Handlers: how each event changes the state, and its immediate commands.

An event that is repeated, or about something that has ended or is unknown, changes nothing. An
event that arrives too early (a reward before its response has finished) is kept until it applies,
so the order of events does not decide which groups there are. The table in `protocol/group.py` says
which event is accepted in which state of a member.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rhymeflow.core import events
from rhymeflow.core.commands import Command
from rhymeflow.core.instance import Instance
from rhymeflow.core.protocol.group import FINISHED, NOT_FINISHED, Group, Member, MemberState
from rhymeflow.core.spread import is_flat, normalized_sum
from rhymeflow.core.state import RequestedPrompt, State
from rhymeflow.core.types import EvaluationId, FinishReason, TrajectoryId

Commands = Iterator[Command]


def on_group_created(state: State, event: events.GroupCreated) -> None:
    """Keep the group until all lower numbers are reported; add all groups whose turn it is."""
    if event.group >= state.next_group:
        state.early[event.group] = event
    while state.next_group in state.early:
        _add_group(state, state.early.pop(state.next_group))


def _add_group(state: State, event: events.GroupCreated) -> None:
    """Queue the next group for admission; a retried prompt goes first."""
    state.next_group += 1
    state.num_requested -= 1
    retries = 0 if event.repeats is None else state.retries.pop(event.repeats)
    state.prompts[event.group] = RequestedPrompt(event.prompt_tokens, retries)
    state.lengths.open(event.group, event.prompt, event.epoch)
    if event.repeats is None:
        state.queue.unadmitted.append(event.group)
    else:
        state.queue.unadmitted.appendleft(event.group)


def on_instance_joined(state: State, event: events.InstanceJoined) -> None:
    """Add an instance, unless one of that name has joined or left."""
    if event.instance not in state.names:
        state.names.add(event.instance)
        state.instances[event.instance] = Instance(
            event.instance, event.version, event.capacity, event.kv_capacity
        )


def on_instance_left(state: State, event: events.InstanceLeft) -> Commands:
    """Requeue the instance's trajectories; a late `InstanceJoined` for it will be ignored."""
    state.names.add(event.instance)
    instance = state.instances.pop(event.instance, None)
    if instance is None:
        return
    orphans = [*instance.assigned, *sorted(instance.stopping)]
    for trajectory in orphans:
        state.put_back(trajectory, events.InstanceLeft)
    for trajectory in orphans:
        yield from _finish_early(state, trajectory)
    state.evaluations |= instance.evaluating


def on_snapshot(state: State, event: events.Snapshot) -> None:
    """Update the instance's state from a snapshot."""
    if event.instance in state.instances:
        state.instances[event.instance].reflect(event)


def on_pulled(state: State, event: events.Pulled) -> None:
    """Record an instance's version, which may be newer than its `Pull` said."""
    if event.instance in state.instances:
        state.instances[event.instance].pulled(event.version)


def on_trajectory_interrupted(state: State, event: events.TrajectoryInterrupted) -> Commands:
    """Requeue a trajectory; if its instance was lost, it is queued already: update its length."""
    member = state.member(event.trajectory)
    if member is None:
        return
    if member.instance == event.instance or member.state is MemberState.WAITING:
        member.length = max(member.length, event.length)
    if (member.instance, member.stop) != (event.instance, event.number):
        return
    if state.put_back(event.trajectory, events.TrajectoryInterrupted):
        state.instances[event.instance].stopping.discard(event.trajectory)
        yield from _finish_early(state, event.trajectory)


def _finish_early(state: State, trajectory: TrajectoryId) -> Commands:
    """Finish a stopped member with the tokens it has, if its group is finishing early."""
    group = state.groups.get(trajectory.group)  # ended if another member just ended it
    if group is None or not group.finishing_early:
        return
    if group.members[trajectory.member].length == 0:  # nothing to reward
        yield from state.retry(group, "stuck, and there was nothing of it yet")
    else:
        yield from state.finish_early(trajectory)


def on_trajectory_finished(state: State, event: events.TrajectoryFinished) -> Commands:
    """Record that a response is complete; its reward is being computed."""
    member = state.member(event.trajectory)
    if member is None or member.instance != event.instance:
        return
    if member.apply(events.TrajectoryFinished):
        _leave_instance(state, event, member)
        yield from _finished(state, event.trajectory, event.reason)


def _leave_instance(
    state: State, event: events.TrajectoryFinished | events.TurnEnded, member: Member
) -> None:
    """Free the cache of a member whose response or turn ended on its instance."""
    tokens = state.groups[event.trajectory.group].prompt_tokens + event.length
    state.instances[event.instance].finished(event.trajectory, tokens)
    member.length = event.length


def _finished(state: State, trajectory: TrajectoryId, reason: FinishReason) -> Commands:
    member = state.groups[trajectory.group].members[trajectory.member]
    if reason != "finished_early":
        state.lengths.finished(trajectory, member.sampled)
    if member.early_result is not None:
        yield from HANDLERS[type(member.early_result)](state, member.early_result) or ()


def on_turn_ended(state: State, event: events.TurnEnded) -> Commands:
    """Take a trajectory off its instance until its environment answers."""
    member = state.member(event.trajectory)
    if member is None or (member.instance, member.turn + 1) != (event.instance, event.turn):
        return
    if member.apply(events.TurnEnded):
        _leave_instance(state, event, member)
        state.num_waiting_env += 1
        member.turn, member.observed = event.turn, member.observed + event.observed
        member.home = event.instance, state.instances[event.instance].version
        yield from _finish_early(state, event.trajectory)


def on_observed(state: State, event: events.Observed) -> None:
    """Queue the policy's next turn to be routed: the environment has answered."""
    member = _end_env_wait(state, event)
    if member is not None:
        member.observed += event.length - member.length
        member.length = event.length
        state.queue.put(event.trajectory, member.version, last=member.is_before_first_call)


def on_episode_ended(state: State, event: events.EpisodeEnded) -> Commands:
    """Record that a multi-turn response is complete; its reward is being computed."""
    if _end_env_wait(state, event) is not None:
        yield from _finished(state, event.trajectory, event.reason)


def on_environment_failed(state: State, event: events.EnvironmentFailed) -> Commands:
    """Treat a failed environment as a failed reward."""
    if _end_env_wait(state, event) is not None:
        yield from _continue_without(state, event.trajectory, f"environment failed: {event.error}")


def on_program_lost(state: State, event: events.ProgramLost) -> Commands:
    """Retry the prompt of a group that still needs the member."""
    member = state.member(event.trajectory)
    group = state.groups.get(event.trajectory.group)
    if group is not None and member is not None and member.state in (*NOT_FINISHED, FINISHED):
        yield from state.retry(group, event.reason)


def _end_env_wait(
    state: State, event: events.Observed | events.EpisodeEnded | events.EnvironmentFailed
) -> Member | None:
    """End a member's wait for its environment and return it; None: it does not wait for this."""
    member = state.member(event.trajectory)
    if member is None or event.turn != member.turn or not member.apply(type(event)):
        return None
    state.num_waiting_env -= 1
    return member


def on_trajectory_rewarded(state: State, event: events.TrajectoryRewarded) -> Commands:
    """Record a reward; with `num_generations` rewarded responses the group is complete."""
    member = _finished_member(state, event)
    if member is None:
        return
    member.reward, member.components = event.reward, event.components
    group = state.groups[event.trajectory.group]
    if len(group.rewarded()) == state.plan.num_generations:
        yield from state.abort_members(group)
        yield from _complete(state, group)


def _complete(state: State, group: Group) -> Commands:
    """Occupy an entry for a complete group, or filter the group if it has no advantages."""
    plan = state.plan
    may_filter = plan.filter_zero_variance and state.num_filtered < plan.max_filtered
    if may_filter and not teaches([group.members[index] for index in group.rewarded()]):
        state.num_filtered += 1
        yield from state.release(group.id, "filtered", "all its rewards are equal")
        return
    group.complete = True
    state.num_inflight -= 1
    yield from state.drop_surplus(state.buffers.occupy(group.id))


def teaches(members: Sequence[Member]) -> bool:
    """Whether any advantage is nonzero: rewards differ, or the sums of normalized components do."""
    components = [each.components for each in members if each.components is not None]
    if len(components) < len(members):
        return not is_flat([each.reward for each in members if each.reward is not None])
    weights = {name: weight for each in components for name, (weight, _) in each.items()}
    values = [{name: value for name, (_, value) in each.items()} for each in components]
    return any(normalized_sum(values, weights))


def on_reward_failed(state: State, event: events.RewardFailed) -> Commands:
    """Continue the group without this member while it has spare ones, else abort the group."""
    if _finished_member(state, event) is not None:
        yield from _continue_without(state, event.trajectory, f"reward failed: {event.error}")


def _continue_without(state: State, trajectory: TrajectoryId, reason: str) -> Commands:
    group = state.groups[trajectory.group]
    if group.num_alive() < state.plan.num_generations:
        yield from state.release(group.id, "aborted", reason)


def _finished_member(
    state: State, event: events.TrajectoryRewarded | events.RewardFailed
) -> Member | None:
    """Apply the event and return its member; None: it has not finished, so the event is kept."""
    member = state.member(event.trajectory)
    if member is None or member.apply(type(event)):
        return member
    if member.state in NOT_FINISHED:
        member.early_result = event
    return None


def on_learner_ready(state: State, event: events.LearnerReady) -> None:
    """Record the first version; a learner that has restarted has accumulated nothing."""
    state.accumulated, state.learner_is_busy = [], state.training is not None
    if state.published is None:
        state.published = event.version


def on_accumulated(state: State, event: events.Accumulated) -> None:
    """Record that the learner is idle, so that it may be given more groups to accumulate."""
    if (event.version, event.parts) == (state.buffers.first, len(state.accumulated)):
        state.learner_is_busy = False


def on_version_published(state: State, event: events.VersionPublished) -> None:
    """Record that the learner has trained on its batch and published the next version."""
    if state.training is not None and event.version == state.training + 1:
        state.published = event.version
        state.training = None
        state.num_filtered = 0
        if not state.accumulated:  # else its `Accumulated` says when it is idle
            state.learner_is_busy = False


def on_evaluated(state: State, event: events.Evaluated) -> None:
    """Record that an evaluation is over."""
    instance = state.instances.get(event.instance)
    if instance is not None:
        instance.evaluating.discard(EvaluationId(event.version, event.suite))


HANDLERS: Mapping[type[Any], Callable[[State, Any], Commands | None]] = {
    events.GroupCreated: on_group_created,
    events.InstanceJoined: on_instance_joined,
    events.InstanceLeft: on_instance_left,
    events.Snapshot: on_snapshot,
    events.Pulled: on_pulled,
    events.TrajectoryInterrupted: on_trajectory_interrupted,
    events.TrajectoryFinished: on_trajectory_finished,
    events.TurnEnded: on_turn_ended,
    events.Observed: on_observed,
    events.EpisodeEnded: on_episode_ended,
    events.EnvironmentFailed: on_environment_failed,
    events.ProgramLost: on_program_lost,
    events.TrajectoryRewarded: on_trajectory_rewarded,
    events.RewardFailed: on_reward_failed,
    events.LearnerReady: on_learner_ready,
    events.Accumulated: on_accumulated,
    events.VersionPublished: on_version_published,
    events.Evaluated: on_evaluated,
}
