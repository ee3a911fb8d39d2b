"""The schedule `rhymeflow`: StaleFlow's rules with lengths foretold.

What an instance has before it is put into seconds: how long until all of it is complete,

    k1 x reading + (max(k2, k3 n + c) + k4) x longest

`reading` sums remaining x (context + remaining / 2) over its responses, `longest` is the most
tokens that one of them needs still (`core/forecast.py`). Drafts make all of it shorter by about the
same factor, which changes no comparison.

- Routing: within a level of the queue the longest first, each to the instance that would be done
  first with it. So long responses begin early, and come to lie beside fewer or shorter ones.
- Synchronisation: an instance pulls when the throughput that it lacks at its version, for as long
  as it would go on with what it has, is worth more than taking all of it in again.
- Migration: from the instance that would be done last to one that nothing can fill, only what is
  expected to last, one by one, as long as both are done sooner than the one was before.

**Where lengths cannot be foretold** (`skill` below `TRUSTED`) each is StaleFlow's own rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

from rhymeflow.core.cost import CostModel
from rhymeflow.core.strategies.migration import rebalance
from rhymeflow.core.strategies.routing import fits, has_room, waterfall
from rhymeflow.core.strategies.sync import greedy
from rhymeflow.core.strategies.view import (
    Assignment,
    FleetView,
    InstanceView,
    Migration,
    Outlook,
    TrajectoryView,
)
from rhymeflow.core.types import TrajectoryId, Version

TRUSTED = 0.1
"""The skill from which on predictions are used: less of the variance explained is hardly more than
nothing, and would only cost."""
WORTH = 0.05
"""A move must bring completion forward by this share."""


def seconds(cost: CostModel, count: int, outlook: Outlook) -> float:
    """Until an instance with so many responses is done with them."""
    return cost.k1 * outlook.reading + _dense(cost, count) * outlook.longest


def _dense(cost: CostModel, count: int) -> float:
    return max(cost.k2, cost.k3 * count + cost.c) + cost.k4


def _added(outlook: Outlook, context: float, remaining: float) -> Outlook:
    reading = outlook.reading + remaining * (context + remaining / 2)
    return Outlook(reading, max(outlook.longest, remaining))


# -- routing ---------------------------------------------------------------------------------------


def foresight(view: FleetView) -> list[Assignment]:
    """Each to the instance that would be done first with it, the longest of a level first.

    Classes of versions, blocks and room are as in `waterfall`.
    """
    if view.forecast.skill < TRUSTED:
        return waterfall(view)
    proposals: list[Assignment] = []
    classes: dict[Version, _Class] | None = None
    for trajectory, remaining in _longest_first(view):
        if classes is None:
            classes = _classes(view)
        if trajectory.version is None and view.num_returning:
            break
        for version in sorted(classes, reverse=trajectory.version is None):
            if version >= trajectory.min_version:
                found = classes[version].give(trajectory, remaining)
                if found is not None:
                    proposals.append(Assignment(trajectory.id, found))
                    break
        else:
            break
    return proposals


def _longest_first(view: FleetView) -> Iterator[tuple[TrajectoryView, float]]:
    """What waits, with the tokens it is expected to need still."""
    forecast, lengths = view.forecast, dict[int, float]()
    ordered: list[tuple[bool, Version, float, int, TrajectoryView]] = []
    for number, trajectory in enumerate(view.queue):
        if trajectory.version is not None:
            remaining = forecast.remaining(trajectory.id)
        else:
            group = trajectory.id.group
            if group not in lengths:
                lengths[group] = forecast.length(group)
            remaining = lengths[group]
        is_new = trajectory.version is None
        ordered.append((is_new, trajectory.version or 0, -remaining, number, trajectory))
    ordered.sort()
    for _, _, remaining, _, trajectory in ordered:
        yield trajectory, -remaining


class _Load:
    """An instance with what this tick has given it."""

    __slots__ = ("count", "instance", "kv_tokens", "outlook")

    def __init__(self, instance: InstanceView, outlook: Outlook) -> None:
        self.instance, self.outlook = instance, outlook
        self.count, self.kv_tokens = len(instance.assigned), instance.kv_tokens


class _Class:
    """Instances of one version, as a heap of (seconds until done, place).

    Seconds only grow by what is added, so an entry is a lower bound of what it would be with one
    response more; the best is found by looking at entries until none can be better.
    """

    def __init__(self, view: FleetView) -> None:
        self._weights = view.weights
        self._loads: dict[int, _Load] = {}
        self._heap: list[tuple[float, int]] = []

    def put(self, place: int, load: _Load) -> None:
        self._loads[place] = load
        self._heap.append((self._seconds(load), place))

    def order(self) -> None:
        heapify(self._heap)

    def give(self, trajectory: TrajectoryView, remaining: float) -> str | None:
        """Give it to the instance that would be done first with it; None: none has room."""
        best: tuple[float, int, Outlook] | None = None
        seen: list[tuple[float, int]] = []
        while self._heap and (best is None or self._heap[0][0] < best[0]):
            entry = heappop(self._heap)
            seen.append(entry)
            load = self._loads[entry[1]]
            if not fits(load.kv_tokens, trajectory.tokens, load.instance, self._weights):
                continue
            outlook = _added(load.outlook, trajectory.tokens, remaining)
            until = seconds(self._weights.cost, load.count + 1, outlook)
            if best is None or (until, entry[1]) < best[:2]:
                best = (until, entry[1], outlook)
        for entry in seen:
            if best is None or entry[1] != best[1]:
                heappush(self._heap, entry)
        if best is None:
            return None
        load = self._loads[best[1]]
        load.outlook, load.count = best[2], load.count + 1
        load.kv_tokens += trajectory.tokens
        if load.count < load.instance.capacity:
            heappush(self._heap, (best[0], best[1]))
        return load.instance.name

    def _seconds(self, load: _Load) -> float:
        return seconds(self._weights.cost, load.count, load.outlook)


def _classes(view: FleetView) -> dict[Version, _Class]:
    """Instances that have room and nothing waiting, by version."""
    classes: dict[Version, _Class] = {}
    for place, instance in enumerate(view.instances):
        if has_room(instance) and not instance.waiting:
            of_version = classes.setdefault(instance.version, _Class(view))
            of_version.put(place, _Load(instance, view.forecast.outlook(instance.name)))
    for each in classes.values():
        each.order()
    return classes


# -- synchronisation -------------------------------------------------------------------------------


def worthwhile(instance: InstanceView, view: FleetView) -> bool:
    """When what a pull gains is more than what it costs.

    It costs the pull and taking in again all that is cached. It gains the throughput that the
    instance lacks, compared with the fullest of the fleet, for as long as it would go on with what
    it has; but nothing while it could be given something at the version it holds. One that is empty
    pulls. Why it pulls in the end: see `status`; without new work it runs empty.
    """
    if not instance.assigned or view.forecast.skill < TRUSTED:
        return greedy(instance, view)
    if instance.waiting:
        return False
    if view.lowest_waiting is not None and has_room(instance):
        return view.lowest_waiting > instance.version
    if instance.version in view.admissible:
        return False
    cost, count = view.weights.cost, len(instance.assigned)
    most = max(cost.throughput(len(x.assigned), x.kv_tokens) for x in view.instances)
    lacking = 1 - cost.throughput(count, instance.kv_tokens) / most
    gained = lacking * seconds(cost, count, view.forecast.outlook(instance.name))
    return gained > cost.pull + cost.prefill_token * instance.kv_tokens


# -- migration -------------------------------------------------------------------------------------


def selective(view: FleetView) -> Iterable[Migration]:
    """What waits in vain goes back, as in `rebalance`; of what runs, only what is to last moves."""
    if view.forecast.skill < TRUSTED:
        yield from rebalance(view)
        return
    if any(len(x.waiting) > view.weights.max_waiting for x in view.instances):
        if any(has_room(x) and not x.waiting for x in view.instances):
            overfull = [x for x in view.instances if len(x.waiting) > view.weights.max_waiting]
            yield from (Migration(x.name, x.waiting) for x in overfull)
        return
    if view.lowest_waiting is None and not view.num_returning:
        yield from _evened(view)


def _evened(view: FleetView) -> Iterator[Migration]:
    """The least loaded beside the one that is done last, of each version."""
    takers: dict[Version, list[InstanceView]] = {}
    for instance in view.instances:
        if has_room(instance) and not instance.waiting and instance.version not in view.admissible:
            takers.setdefault(instance.version, []).append(instance)
    cost = view.weights.cost
    for version, able in takers.items():
        until = {
            x.name: seconds(cost, len(x.assigned), view.forecast.outlook(x.name))
            for x in view.instances
            if x.version == version
        }
        givers = sorted(
            (x for x in view.instances if x.name in until), key=lambda x: -until[x.name]
        )
        able.sort(key=lambda x: until[x.name])
        for giver, taker in zip(givers, able, strict=False):
            if until[taker.name] * view.weights.imbalance >= until[giver.name]:
                break
            if taken := _taken(view, giver, taker):
                yield Migration(giver.name, taken)


def _taken(view: FleetView, giver: InstanceView, taker: InstanceView) -> tuple[TrajectoryId, ...]:
    """What the giver gives away: the longest to last, while both are done sooner for it."""
    cost, forecast = view.weights.cost, view.forecast
    running = [t for t in giver.assigned if t not in giver.waiting]
    lasting = sorted((-forecast.remaining(t), t) for t in running)
    given, kept = forecast.outlook(taker.name), forecast.outlook(giver.name)
    count, left = len(taker.assigned), len(giver.assigned)
    kv_tokens, extra = taker.kv_tokens, 0.0
    taken: list[TrajectoryId] = []
    for index, (minus, trajectory) in enumerate(lasting[:-1]):
        remaining = -minus
        context = giver.assigned[trajectory]
        before = max(seconds(cost, left, kept), seconds(cost, count, given) + extra)
        with_it = _added(given, context, remaining)
        # The next in order is the longest that is left on the giver.
        without = Outlook(
            max(0.0, kept.reading - remaining * (context + remaining / 2)), -lasting[index + 1][0]
        )
        again = extra + cost.prefill_token * context
        after = max(seconds(cost, left - 1, without), seconds(cost, count + 1, with_it) + again)
        if (
            count >= taker.capacity
            or not fits(kv_tokens, context, taker, view.weights)
            or after > (1 - WORTH) * before
        ):
            break
        taken.append(trajectory)
        given, kept, extra = with_it, without, again
        count, left, kv_tokens = count + 1, left - 1, kv_tokens + context
    return tuple(taken)
