"""Plans the commands of one tick on the speculative state.

Each command is applied to the state before the next one is planned, so no free capacity is filled
twice. Strategies propose; proposals that the protocol does not allow are dropped here. Training
comes first, then pulls, then migration and routing, so that work starts at the freshest version."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from rhymeflow.core import commands
from rhymeflow.core.commands import Command
from rhymeflow.core.instance import Instance
from rhymeflow.core.protocol.group import Group, MemberState
from rhymeflow.core.state import State
from rhymeflow.core.strategies.base import FleetView, InstanceView, TrajectoryView, assignment_limit
from rhymeflow.core.types import EvaluationId, SuiteName, TrajectoryId, Version


def plan(state: State) -> Iterator[Command]:
    """Plan one tick."""
    state.has_more = False
    if state.published is None or state.finished:
        return
    yield from _unstick(state)
    yield from _train(state)
    yield from _accumulate(state)
    if _is_over(state):
        state.finished = True
        yield commands.Finish()
        return
    _begin_round(state, state.published)
    yield from _pull(state, state.published)
    yield from _evaluate(state)
    yield from _place(state)
    yield from _request_prompts(state)


# -- training ------------------------------------------------------------------------------------


def _unstick(state: State) -> Iterator[Command]:
    """Retry or finish early the last groups that an idle learner waits for (`on_stuck`)."""
    plan, buffers = state.plan, state.buffers
    if plan.on_stuck == "wait" or state.training is not None:
        return
    if buffers.first >= plan.num_batches or buffers.state(buffers.first) != "stuck":
        return
    occupied = buffers.by_version[buffers.first].occupied
    if plan.groups_per_batch - len(occupied) > plan.stuck_threshold:
        return
    for group_id in buffers.reserved_in(buffers.first):
        group = state.groups.get(group_id)  # None: ending another group has ended this one
        if group is None or group.finishing_early or group.retries >= plan.max_retries:
            continue
        if plan.on_stuck == "retry":
            yield from state.retry(group, "stuck")
        else:
            yield from _finish_early(state, group)


def _finish_early(state: State, group: Group) -> Iterator[Command]:
    """Truncate a group's unfinished members, so that it can be trained on."""
    if any(m.state is MemberState.WAITING and m.length == 0 for m in group.members):
        yield from state.retry(group, "stuck, and there was nothing of it yet")
        return
    group.finishing_early = True
    for trajectory, member in zip(group.ids(), group.members, strict=True):
        if member.state in (MemberState.WAITING, MemberState.WAITING_ENV):
            yield from state.finish_early(trajectory)
        elif member.state is MemberState.RUNNING:
            assert member.instance is not None
            yield from state.interrupt(state.instances[member.instance], (trajectory,))


def _train(state: State) -> Iterator[Command]:
    if state.training is not None or not state.buffers.ready():
        return
    state.training = state.buffers.first
    assert state.training == state.published, (state.training, state.published)
    # Accumulated groups come first, in the order in which they were accumulated.
    ids = dict.fromkeys((*chain(*state.accumulated), *state.buffers.consume()))
    groups = [state.forget(group_id) for group_id in ids]
    parts = tuple(map(len, state.accumulated))
    state.accumulated, state.learner_is_busy = [], True
    yield commands.Train(
        state.training, tuple(g.id for g in groups), tuple(g.rewarded() for g in groups), parts
    )


def _accumulate(state: State) -> Iterator[Command]:
    """Have an idle learner accumulate the complete groups of the next batch. A group that is
    OCCUPIED in the first buffer stays there: OCCUPIED groups only move to earlier buffers, and only
    RESERVED ones are released."""
    buffers = state.buffers
    if not state.plan.accumulate_early or state.learner_is_busy:
        return
    occupied = buffers.occupied_in(buffers.first)
    if len(occupied) == sum(map(len, state.accumulated)):
        return
    group_ids = tuple(sorted(set(occupied).difference(*state.accumulated)))
    state.accumulated.append(group_ids)
    state.learner_is_busy = True
    members = tuple(state.groups[group_id].rewarded() for group_id in group_ids)
    yield commands.Accumulate(buffers.first, group_ids, members)


def _is_over(state: State) -> bool:
    last = state.plan.num_batches
    if state.published != last or any(each.version == last for each in state.evaluations):
        return False
    return not any(instance.evaluating for instance in state.instances.values())


# -- weights -------------------------------------------------------------------------------------


def _pull(state: State, published: Version) -> Iterator[Command]:
    """Have instances pull. Once about `assignment_limit` trajectories are interrupted, the other
    instances stay in `state.pulling`: the next ticks, which follow at once, begin with these."""
    names = state.pulling or tuple(i.name for i in _to_pull(state, published))
    most = assignment_limit(len(state.instances))
    num_interrupted = 0
    for done, name in enumerate(names):
        if num_interrupted >= most and not state.schedule.is_replayed:
            state.pulling, state.has_more = names[done:], True
            return
        instance = state.instances.get(name)
        if instance is None or instance.version >= published or instance.evaluating:
            continue  # it left, pulled or began to evaluate after it was chosen
        if state.schedule.on_pull == "reroute" and instance.assigned:
            num_interrupted += len(instance.assigned)
            yield from state.interrupt(instance, tuple(instance.assigned))
        instance.version = published
        yield commands.Pull(name, instance.next_number(), published)
    state.pulling = ()


def _to_pull(state: State, published: Version) -> list[Instance]:
    """Choose the instances that are to pull now."""
    # An evaluation delays the pull: all its responses must come from one version.
    lagging = [i for i in state.instances.values() if i.version < published and not i.evaluating]
    if state.schedule.on_pull == "drain":
        lagging = [i for i in lagging if not i.assigned]
    if not lagging or published == state.plan.num_batches:
        return lagging  # nothing is generated after the last version
    view = view_of(state)
    seen = {instance.name: instance for instance in view.instances}
    chosen = [i for i in lagging if state.schedule.sync(seen[i.name], view)]
    return chosen or _to_evaluate(state, lagging, published)


def _to_evaluate(state: State, lagging: list[Instance], published: Version) -> list[Instance]:
    """Choose the least loaded instance if `published` is to be evaluated and no instance has it.
    Otherwise it would be evaluated late, when the rules let an instance pull, or never."""
    if state.schedule.is_replayed:
        return []
    is_due = any((published, suite) in state.evaluations for suite in state.plan.eval_steps)
    if not is_due or any(i.version >= published for i in state.instances.values()):
        return []
    return [min(lagging, key=lambda instance: len(instance.assigned))]


def _evaluate(state: State) -> Iterator[Command]:
    """Assign the evaluations that are due to the instances in turn."""
    may_continue = bool(state.evaluations)
    while may_continue:
        may_continue = False
        for instance in state.instances.values():
            suite = _next_evaluation(state, instance)
            if suite is not None:
                may_continue, evaluation = True, EvaluationId(instance.version, suite)
                state.evaluations.remove(evaluation)
                instance.evaluating.add(evaluation)
                yield commands.Evaluate(instance.name, instance.next_number(), *evaluation)


def _next_evaluation(state: State, instance: Instance) -> SuiteName | None:
    """Choose a suite on which the instance's version is to be evaluated now, or None."""
    version = instance.version
    for suite in state.plan.eval_steps:
        if (version, suite) in state.evaluations:
            is_on_older = any(each.version != version for each in instance.evaluating)
            return None if is_on_older else suite
    return None


# -- routing -------------------------------------------------------------------------------------


def _begin_round(state: State, published: Version) -> None:
    """Lockstep: allow the next batch to be admitted once the last one is complete."""
    if state.round_left == 0 and state.num_inflight == 0:
        state.round_left = state.plan.groups_per_batch + state.plan.extra_groups
        state.round_version = published


def _place(state: State) -> Iterator[Command]:
    """Interrupt trajectories that are to migrate, and route those that wait."""
    if len(state.instances) < 2 and not state.queue:
        return
    state.layout.extend(state)
    if state.pulling:
        return  # a trajectory routed to one of these would be interrupted at once
    view = view_of(state)
    moves = list(_migrate(state, view))
    yield from moves
    yield from _route(state, view_of(state) if moves else view)


def _migrate(state: State, view: FleetView) -> Iterator[Command]:
    for migration in tuple(state.schedule.migration(view)):
        instance = state.instances[migration.instance]
        assigned = tuple(t for t in migration.trajectories if t in instance.assigned)
        if not assigned:
            continue
        if migration.to in state.instances:
            state.layout.move(assigned, migration.to, later=migration.later)
        yield from state.interrupt(instance, assigned)


def _route(state: State, view: FleetView) -> Iterator[Command]:
    if not state.queue:
        return
    proposals = tuple(state.schedule.routing(view))
    for trajectory, name in proposals:
        instance = state.instances[name]
        if state.accepts(instance):
            for command in state.start(trajectory, instance):
                # Set only if one starts: else the next tick would propose the same again.
                state.has_more = len(proposals) >= assignment_limit(len(state.instances))
                yield command


def _request_prompts(state: State) -> Iterator[Command]:
    # Up to one batch ahead, so that admission never waits for the data.
    ahead = state.plan.groups_per_batch + state.plan.extra_groups
    waiting = len(state.queue.unadmitted) + state.num_requested
    count = min(state.buffers.num_empty(), ahead) - waiting
    if count > 0:
        state.num_requested += count
        yield commands.RequestPrompts(count)


# -- what strategies see --------------------------------------------------------------------------


def view_of(state: State) -> FleetView:
    """Return the fleet as strategies see it now."""
    assert state.published is not None
    instances = _instances(state)
    admissible: frozenset[Version] = frozenset()
    if state.queue.unadmitted:
        versions = {i.version for i in instances if i.accepts}
        admissible = frozenset(v for v in versions if state.admits(v))
    new_groups = {trajectory.group for trajectory in state.queue.new}
    waiting = [state.min_version(group) for group in new_groups]
    lowest = state.queue.lowest_version()
    if lowest is not None:
        waiting.append(lowest)
    return FleetView(
        published=state.published,
        instances=instances,
        queue=_Queue(state, admissible),
        lowest_waiting=min(waiting, default=None),
        num_returning=sum(len(i.stopping) for i in state.instances.values()),
        admissible=admissible,
        settings=state.schedule.settings,
        lengths=state.lengths,
        layout=state.layout,
    )


def _instances(state: State) -> tuple[InstanceView, ...]:
    instances = state.instances.values()
    if state.all_accept:  # reads the cached views, without a call for each of many instances
        return tuple([i.shown or i.view(accepts=True) for i in instances])
    return tuple([i.view(accepts=state.accepts(i)) for i in instances])


class _Queue:
    """The trajectories that wait to be routed, read from the state during iteration."""

    def __init__(self, state: State, admissible: frozenset[Version]) -> None:
        self._state, self._admissible = state, admissible

    def __iter__(self) -> Iterator[TrajectoryView]:
        state = self._state
        for version, trajectory in state.queue.partial():
            group = state.groups[trajectory.group]
            member = group.members[trajectory.member]
            tokens = group.prompt_tokens + member.length
            yield TrajectoryView(trajectory, version, version, tokens, state.home(member))
        for trajectory in state.queue.new:
            tokens = state.groups[trajectory.group].prompt_tokens
            yield TrajectoryView(trajectory, None, state.min_version(trajectory.group), tokens)
        if self._admissible:
            yield from self._unadmitted(min(self._admissible))

    def _unadmitted(self, min_version: Version) -> Iterator[TrajectoryView]:
        state = self._state
        size = state.plan.num_generations + state.plan.extra_generations
        for _, group_id in zip(range(state.room()), state.queue.unadmitted, strict=False):
            for member in range(size):
                tokens = state.prompts[group_id].tokens
                yield TrajectoryView(TrajectoryId(group_id, member), None, min_version, tokens)
