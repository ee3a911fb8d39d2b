"""What each fact changes, and the commands that follow from it at once.

Holds true: a fact that came late or twice, or is about what has ended, changes nothing and commands
nothing. Which fact is believed in which state is the table in `group.py`. Plans nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rhymeflow.core import events
from rhymeflow.core.books import Books
from rhymeflow.core.commands import Command, Conclude, Redraw
from rhymeflow.core.fleet import Instance
from rhymeflow.core.group import ON_INSTANCE, Group, State

Consequences = Iterator[Command]


def on_drawn(books: Books, event: events.GroupDrawn) -> Consequences:
    """One more group waits to be admitted; a prompt drawn again goes first."""
    if event.group == books.next_group:
        books.next_group += 1
        books.asked_for -= 1
        retries = 0 if event.repeats is None else books.retries.pop(event.repeats)
        books.prompts[event.group] = (event.prompt_tokens, retries)
        books.history.open(event.group, event.prompt, event.epoch)
        if event.repeats is None:
            books.queue.drawn.append(event.group)
        else:
            books.queue.drawn.appendleft(event.group)
    yield from ()


def on_joined(books: Books, event: events.InstanceJoined) -> Consequences:
    """One more instance."""
    if event.instance not in books.names:
        books.names.add(event.instance)
        books.instances[event.instance] = Instance(
            event.instance, event.version, event.capacity, event.kv_capacity
        )
    yield from ()


def on_left(books: Books, event: events.InstanceLeft) -> Consequences:
    """What it had waits to be routed anew, from what is stored of it."""
    instance = books.instances.pop(event.instance, None)
    if instance is None:
        return
    orphans = [*instance.assigned, *sorted(instance.stopping)]
    for trajectory in orphans:
        member = books.member(trajectory)
        assert member is not None
        books.put_back(trajectory, member)
    for trajectory in orphans:
        if trajectory.group in books.groups:  # the one before may have ended it
            yield from _go_on_ending(books, books.groups[trajectory.group], trajectory.member)
    if instance.evaluating is not None:
        books.evaluations.add(instance.evaluating)


def on_snapshot(books: Books, event: events.Snapshot) -> Consequences:
    """How an instance was."""
    instance = books.instances.get(event.instance)
    if instance is not None:
        instance.reflect(event.number, event.waiting, event.kv_tokens, event.made)
    yield from ()


def on_pulled(books: Books, event: events.Pulled) -> Consequences:
    """An instance may have got a version newer than the one it was told to take."""
    instance = books.instances.get(event.instance)
    if instance is not None:
        instance.holds(event.version)
    yield from ()


def on_interrupted(books: Books, event: events.TrajectoryInterrupted) -> Consequences:
    """A trajectory waits to be routed anew."""
    member = books.member(event.trajectory)
    if (
        member is None
        or member.state is not State.STOPPING
        or (member.instance, member.stop) != (event.instance, event.number)
    ):
        return
    books.instances[event.instance].stopping.discard(event.trajectory)
    member.length = event.length
    books.put_back(event.trajectory, member)
    yield from _go_on_ending(books, books.groups[event.trajectory.group], event.trajectory.member)


def _go_on_ending(books: Books, group: Group, index: int) -> Consequences:
    """A member of a group that is being cut has stopped: it is complete as it is."""
    if not group.cut:
        return
    member, trajectory = group.members[index], group.ids()[index]
    if member.length == 0:  # nothing to judge
        yield from draw_again(books, group, "stuck, and there was nothing of it yet")
        return
    books.queue.take(trajectory, member.version)
    member.state = State.FINISHED
    yield Conclude(trajectory)


def draw_again(books: Books, group: Group, reason: str) -> Consequences:
    """End a group and have its prompt drawn once more."""
    books.retries[group.serial] = group.retries + 1
    books.asked_for += 1
    yield from books.release(group.serial, "aborted", f"{reason}; its prompt is drawn again")
    yield Redraw(group.serial)


def on_finished(books: Books, event: events.TrajectoryFinished) -> Consequences:
    """A response is complete and is being judged."""
    member = books.member(event.trajectory)
    if member is None or member.state not in ON_INSTANCE or member.instance != event.instance:
        return
    tokens = books.groups[event.trajectory.group].prompt_tokens + event.length
    books.instances[event.instance].finished(event.trajectory, tokens)
    member.state, member.instance, member.length = State.FINISHED, None, event.length
    if event.reason != "cut":
        books.history.finished(event.trajectory, event.length)
    yield from ()


def on_rewarded(books: Books, event: events.TrajectoryRewarded) -> Consequences:
    """A response is judged; with enough of them the group is complete."""
    group = books.groups.get(event.trajectory.group)
    if group is None:
        return
    member = group.members[event.trajectory.member]
    if member.state is not State.FINISHED:
        return
    member.state, member.reward = State.REWARDED, event.reward
    books.history.rewarded(event.trajectory, event.reward)
    group.num_rewarded += 1
    if group.num_rewarded == books.plan.num_generations:
        yield from books.abort_members(group)
        yield from _complete(books, group)


def _complete(books: Books, group: Group) -> Consequences:
    plan = books.plan
    rewards = {m.reward for m in group.members if m.state is State.REWARDED}
    if plan.filter_zero_variance and len(rewards) == 1 and books.num_filtered < plan.max_filtered:
        books.num_filtered += 1
        yield from books.release(group.serial, "filtered", "all its rewards are equal")
        return
    group.complete = True
    books.num_incomplete -= 1
    yield from books.end_surplus(books.buffers.occupy(group.serial))


def on_reward_failed(books: Books, event: events.RewardFailed) -> Consequences:
    """The group goes on without this member while it has spare ones, else it ends."""
    group = books.groups.get(event.trajectory.group)
    if group is None or group.members[event.trajectory.member].state is not State.FINISHED:
        return
    group.members[event.trajectory.member].state = State.ABORTED
    if group.num_alive() < books.plan.num_generations:
        yield from books.release(group.serial, "aborted", f"reward failed: {event.error}")


def on_learner_ready(books: Books, event: events.LearnerReady) -> Consequences:
    """The first version is there."""
    if books.published is None:
        books.published = event.version
    yield from ()


def on_published(books: Books, event: events.VersionPublished) -> Consequences:
    """The learner has stepped."""
    if books.training is not None and event.version == books.training + 1:
        books.published = event.version
        books.training = None
        books.num_filtered = 0
    yield from ()


def on_evaluated(books: Books, event: events.Evaluated) -> Consequences:
    """An evaluation is over."""
    instance = books.instances.get(event.instance)
    if instance is not None and instance.evaluating == event.version:
        instance.evaluating = None
    yield from ()


TABLE: dict[type[Any], Callable[[Books, Any], Consequences]] = {
    events.GroupDrawn: on_drawn,
    events.InstanceJoined: on_joined,
    events.InstanceLeft: on_left,
    events.Snapshot: on_snapshot,
    events.Pulled: on_pulled,
    events.TrajectoryInterrupted: on_interrupted,
    events.TrajectoryFinished: on_finished,
    events.TrajectoryRewarded: on_rewarded,
    events.RewardFailed: on_reward_failed,
    events.LearnerReady: on_learner_ready,
    events.VersionPublished: on_published,
    events.Evaluated: on_evaluated,
}
