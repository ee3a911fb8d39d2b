"""What is to be done next, on the speculative state.

Holds true: a plan depends on the books alone; what is commanded is entered in the books before the
next thing is planned, so the same gap is never filled twice. A strategy proposes; what the protocol
does not allow is left out here. The order matters: a batch that is complete goes first, then who
pulls, then who runs what, so that work starts at the freshest version.
"""

from __future__ import annotations

from collections.abc import Iterator

from rhymeflow.core import overview
from rhymeflow.core.books import Books
from rhymeflow.core.commands import (
    Command,
    Conclude,
    Draw,
    Evaluate,
    Finish,
    Hurry,
    Interrupt,
    Pull,
    Route,
    Train,
)
from rhymeflow.core.facts import draw_again
from rhymeflow.core.fleet import Instance
from rhymeflow.core.forecast import Forecast
from rhymeflow.core.group import Group, State
from rhymeflow.core.strategies.layout import Ranked, lay_out
from rhymeflow.core.strategies.view import FleetView
from rhymeflow.core.types import TrajectoryId, Version


def plan(books: Books) -> Iterator[Command]:
    """Plan one tick."""
    if books.published is None or books.finished:
        return
    yield from _unstick(books)
    yield from _train(books)
    if _is_over(books):
        books.finished = True
        yield Finish()
        return
    _begin_round(books)
    yield from _pull(books, books.published)
    yield from _evaluate(books)
    yield from _place(books)
    yield from _hurry(books)
    yield from _draw(books)


# -- training ------------------------------------------------------------------------------------


def _unstick(books: Books) -> Iterator[Command]:
    """Do something about the last groups that an idle learner waits for."""
    plan, buffers = books.plan, books.buffers
    if plan.on_stuck == "wait" or books.training is not None:
        return
    if buffers.first >= plan.num_batches or buffers.state(buffers.first) != "stuck":
        return
    occupied = buffers.books()[buffers.first].occupied
    if plan.groups_per_batch - len(occupied) > plan.stuck_threshold:
        return
    for serial in buffers.reserved_in(buffers.first):
        group = books.groups.get(serial)
        if group is None or group.cut or group.retries >= plan.max_retries:
            continue
        if plan.on_stuck == "retry":
            yield from draw_again(books, group, "stuck")
        else:
            yield from _cut(books, group)


def _cut(books: Books, group: Group) -> Iterator[Command]:
    """End a group's members where they are, so that it can be trained on."""
    waiting = [m for m in group.members if m.state is State.WAITING]
    if any(member.length == 0 for member in waiting):
        yield from draw_again(books, group, "stuck, and there was nothing of it yet")
        return
    group.cut = True
    for trajectory, member in zip(group.ids(), group.members, strict=True):
        if member.state is State.WAITING:
            books.queue.take(trajectory, member.version)
            member.state = State.FINISHED
            yield Conclude(trajectory)
        elif member.state is State.RUNNING:
            assert member.instance is not None
            yield _interrupt(books, books.instances[member.instance], (trajectory,))


def _train(books: Books) -> Iterator[Command]:
    if books.training is not None or not books.buffers.ready():
        return
    books.training = books.buffers.first
    assert books.training == books.published, (books.training, books.published)
    groups = books.buffers.consume()
    members = []
    for serial in groups:
        group = books.groups.pop(serial)
        members.append(group.rewarded())
        books.history.close(serial)
        books.pipeline.end(serial, len(group.members))
        del books.prompts[serial]
    yield Train(books.training, groups, tuple(members))


def _is_over(books: Books) -> bool:
    last = books.plan.num_batches
    evaluating = any(i.evaluating is not None for i in books.instances.values())
    return books.published == last and last not in books.evaluations and not evaluating


# -- weights -------------------------------------------------------------------------------------


def _pull(books: Books, published: Version) -> Iterator[Command]:
    # An evaluation under way holds a pull back: its answers are to be of one version.
    lagging = [
        i for i in books.instances.values() if i.version < published and i.evaluating is None
    ]
    if not lagging:
        return
    view = overview.view(books)
    by_name = {instance.name: instance for instance in view.instances}
    is_last = published == books.plan.num_batches  # nothing is left to wait for
    if books.schedule.on_pull == "drain":
        lagging = [i for i in lagging if not i.assigned]
    chosen = [i for i in lagging if is_last or books.schedule.sync(by_name[i.name], view)]
    for instance in chosen:
        if books.schedule.on_pull == "spread" and instance.assigned:
            yield _interrupt(books, instance, tuple(instance.assigned))
        instance.version = published
        yield Pull(instance.name, instance.next_number(), published)


def _evaluate(books: Books) -> Iterator[Command]:
    for instance in books.instances.values():
        if instance.evaluating is None and instance.version in books.evaluations:
            books.evaluations.remove(instance.version)
            instance.evaluating = instance.version
            yield Evaluate(instance.name, instance.next_number(), instance.version)


# -- routing -------------------------------------------------------------------------------------


def _begin_round(books: Books) -> None:
    """Lockstep: when all of a batch is complete, the next may be admitted."""
    if books.round_left == 0 and books.num_incomplete == 0:
        assert books.published is not None
        books.round_left = books.plan.groups_per_batch + books.plan.extra_groups
        books.round_version = books.published


def _place(books: Books) -> Iterator[Command]:
    """Take away what is to move, and route what waits."""
    if len(books.instances) < 2 and not books.queue:
        return
    _lay_out(books)
    view = overview.view(books)
    moves = list(_migrate(books, view))
    yield from moves
    yield from _route(books, overview.view(books) if moves else view)


def _migrate(books: Books, view: FleetView) -> Iterator[Command]:
    for migration in tuple(books.schedule.migration(view)):
        instance = books.instances[migration.instance]
        there = tuple(t for t in migration.trajectories if t in instance.assigned)
        if not there:
            continue
        if migration.to in books.instances:
            for trajectory in there:
                books.pipeline.move(trajectory, migration.to, later=migration.later)
        yield _interrupt(books, instance, there)


def _lay_out(books: Books) -> None:
    """Lay out the next step once an instance is done with the last one."""
    tiers, pipeline, instances = books.schedule.tiers, books.pipeline, books.instances
    if tiers is None or not instances:
        return
    pipeline.settle(instances.keys())
    to_come = [serial for serial in books.queue.drawn if serial not in pipeline]
    size = books.plan.groups_per_batch + books.plan.extra_groups
    for serial in [s for s in to_come if books.prompts[s][1]]:  # drawn again: it belongs to a step
        pipeline.join(serial, instances)
        to_come.remove(serial)
    last = pipeline.num_steps - 1
    steps = (pipeline.step([*i.assigned, *i.stopping]) for i in instances.values())
    is_one_done = any(step is None or step > last for step in steps)
    if not to_come or not is_one_done or len(to_come) < len(books.queue.drawn):
        return
    forecast = Forecast(books)
    points = [(i + 0.5) / books.plan.num_generations for i in range(books.plan.num_generations)]
    ranked = [
        Ranked(s, books.prompts[s][0], tuple(sorted(forecast.quantile(s, q) for q in points)))
        for s in to_come[:size]
    ]
    places = min(instance.capacity for instance in instances.values())
    shares = lay_out(
        ranked, len(instances), books.schedule.weights.cost, places, balance=tiers.balance
    )
    pipeline.lay_out(shares, list(instances), alternate=tiers.alternate)


def _route(books: Books, view: FleetView) -> Iterator[Command]:
    if not books.queue:
        return
    for trajectory, name in tuple(books.schedule.routing(view)):
        instance = books.instances[name]
        if not overview.accepts(books, instance) or not books.start(trajectory, instance):
            continue
        number = instance.next_number(instance.assigned[trajectory])
        yield Route(name, number, trajectory)


def _hurry(books: Books) -> Iterator[Command]:
    """Tell instances whose tokens are worth more, where that has changed."""
    urgency = books.schedule.weights.urgency
    if urgency == 1.0:
        return
    preferred = {p.instance: p.trajectories for p in books.schedule.hurrying(overview.view(books))}
    for name, instance in books.instances.items():
        chosen = frozenset(preferred.get(name, ())) & instance.assigned.keys()
        if chosen != instance.hurried & instance.assigned.keys():
            instance.hurried = chosen
            number = instance.next_number()
            yield Hurry(name, number, tuple(sorted(chosen)), urgency)


def _interrupt(
    books: Books, instance: Instance, trajectories: tuple[TrajectoryId, ...]
) -> Interrupt:
    number = instance.take(trajectories)
    for trajectory in trajectories:
        member = books.member(trajectory)
        assert member is not None
        member.state, member.stop = State.STOPPING, number
    instance.stopping.update(trajectories)
    return Interrupt(instance.name, number, trajectories)


def _draw(books: Books) -> Iterator[Command]:
    # One batch ahead, so that admission never waits for the data, but none too many.
    plan = books.plan
    waiting = len(books.queue.drawn) + books.asked_for
    ahead = plan.groups_per_batch + plan.extra_groups
    count = min(books.buffers.num_empty(), ahead) - waiting
    if count > 0:
        books.asked_for += count
        yield Draw(count)
