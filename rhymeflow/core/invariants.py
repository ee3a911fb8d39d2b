"""What must hold in the mind between any two events; `check` raises where it does not.

Written from the laws and not from the code, so that a test that calls it after every step can see
the code break them. Slow: it looks at everything.
"""

from __future__ import annotations

from rhymeflow.core.books import Books
from rhymeflow.core.group import ON_INSTANCE, State
from rhymeflow.core.staleness import StalenessBuffers


def check_buffers(buffers: StalenessBuffers) -> None:
    """Law 1 and the books: windows, capacities, one entry a group."""
    seen: set[int] = set()
    size = buffers.groups_per_batch + buffers.extra_groups
    for number, buffer in buffers.books().items():
        assert buffers.first <= number < buffers.num_batches, f"buffer {number} does not exist"
        assert len(buffer) <= size, f"buffer {number} is over capacity"
        assert len(buffer.occupied) <= buffers.groups_per_batch, f"buffer {number} has too many"
        if len(buffer.occupied) == buffers.groups_per_batch:
            assert not buffer.reserved, f"buffer {number} is complete and has surplus"
        for group, version in [*buffer.reserved.items(), *buffer.occupied.items()]:
            assert version <= number <= version + buffers.max_staleness, (
                f"group {group} of version {version} sits in buffer {number}"
            )
            assert group not in seen, f"group {group} holds two entries"
            assert buffers.place(group) == number, f"group {group} is not where it is looked up"
            seen.add(group)
    closed = [b for b in buffers.books().values() if len(b.occupied) == buffers.groups_per_batch]
    open_entries = (buffers.num_batches - buffers.first - len(closed)) * size
    held = sum(len(b) for b in buffers.books().values() if b not in closed)
    assert buffers.num_empty() == open_entries - held, "EMPTY entries are miscounted"


def check(books: Books) -> None:
    """The whole mind: protocol, groups, queue and instances tell the same story."""
    check_buffers(books.buffers)
    entries = [b for b in books.buffers.books().values()]
    in_books = {g for b in entries for g in [*b.reserved, *b.occupied]}
    occupied = {g for b in entries for g in b.occupied}
    assert in_books == set(books.groups), "books and groups differ"
    assert occupied == {s for s, g in books.groups.items() if g.complete}
    assert books.num_incomplete == len(books.groups) - len(occupied)
    assert set(books.prompts) == set(books.groups) | set(books.queue.drawn)
    _check_instances(books)
    _check_members(books)


def _check_instances(books: Books) -> None:
    for name, instance in books.instances.items():
        assert not instance.stopping & set(instance.assigned), f"{name} has and stops the same"
        for state, there in (
            (State.RUNNING, set(instance.assigned)),
            (State.STOPPING, instance.stopping),
        ):
            for trajectory in there:
                member = books.member(trajectory)
                assert member is not None, f"{trajectory} of an ended group is on {name}"
                assert (member.state, member.instance) == (state, name), f"{trajectory} is not"
                assert member.version is not None
                assert member.version <= instance.version, f"{trajectory} runs under old weights"


def _check_members(books: Books) -> None:
    waiting = {t for _, t in books.queue.partial()} | set(books.queue.new())
    for serial, group in books.groups.items():
        version = books.buffers.version(serial)
        for trajectory, member in zip(group.ids(), group.members, strict=True):
            assert (trajectory in waiting) == (member.state is State.WAITING), f"{trajectory}"
            on_instance = member.state in ON_INSTANCE
            assert (member.instance is not None) == on_instance, f"{trajectory} is nowhere"
            if on_instance:
                instance = books.instances[str(member.instance)]
                assert trajectory in instance.assigned or trajectory in instance.stopping
            if member.version is not None:
                assert version <= member.version, f"{trajectory} is older than its group"
        count = len(group.rewarded())
        assert group.num_rewarded == count, f"group {serial} is miscounted"
        assert group.complete == (count == books.plan.num_generations), f"group {serial}"
        assert group.num_alive() >= books.plan.num_generations, f"group {serial} cannot end"
    assert all(t.group in books.groups for t in waiting), "what waits has ended"
