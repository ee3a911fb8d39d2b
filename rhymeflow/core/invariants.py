"""What must hold in the mind between any two events; `check` raises where it does not.

Written from the laws and not from the code, so that a test that calls it after every step can see
the code break them.
"""

from __future__ import annotations

from rhymeflow.core.coordinator import Coordinator
from rhymeflow.core.staleness import StalenessBuffers


def check_buffers(buffers: StalenessBuffers) -> None:
    """Law 1 and the books: windows, capacities, one entry a group."""
    seen: set[int] = set()
    for number, buffer in buffers.books().items():
        assert buffers.first <= number < buffers.num_batches, f"buffer {number} does not exist"
        assert len(buffer) <= buffers.groups_per_batch, f"buffer {number} is over capacity"
        for group, version in [*buffer.reserved.items(), *buffer.occupied.items()]:
            assert version <= number <= version + buffers.max_staleness, (
                f"group {group} of version {version} sits in buffer {number}"
            )
            assert group not in seen, f"group {group} holds two entries"
            assert buffers.place(group) == number, f"group {group} is not where it is looked up"
            seen.add(group)


def check(mind: Coordinator) -> None:
    """The whole mind: books, groups and instances tell the same story."""
    check_buffers(mind.buffers)
    in_books = {g for b in mind.buffers.books().values() for g in [*b.reserved, *b.occupied]}
    assert in_books == set(mind.groups), "books and groups differ"
    for name, instance in mind.instances.items():
        assert len(instance.assigned) <= instance.capacity, f"{name} is over capacity"
        for trajectory in instance.assigned:
            group = mind.groups[trajectory.group]
            assert group.routed[trajectory.member] == name, f"{trajectory} is on two instances"
            assert trajectory.member not in group.finished, f"{trajectory} has finished"
    for serial, group in mind.groups.items():
        assert group.rewarded <= group.finished <= set(group.routed), f"group {serial} is confused"
        place = mind.buffers.place(serial)
        assert place is not None
        complete = len(group.rewarded) == mind.plan.num_generations
        assert (serial in mind.buffers.books()[place].occupied) == complete
