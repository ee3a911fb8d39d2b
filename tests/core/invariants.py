"""What must hold in the coordinator between any two events; `check` raises where it does not.

Written from the laws and not from the code, so that a test that calls it after every step can see
the code break them. Slow: it looks at everything."""

from rhymeflow.core.protocol.group import ON_INSTANCE, MemberState
from rhymeflow.core.protocol.staleness import StalenessBuffers
from rhymeflow.core.state import State


def check_buffers(buffers: StalenessBuffers) -> None:
    """Law 1 and the buffers: windows, capacities, one entry a group."""
    seen: set[int] = set()
    size = buffers.groups_per_batch + buffers.extra_groups
    for number, buffer in buffers.by_version.items():
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
    closed = [b for b in buffers.by_version.values() if len(b.occupied) == buffers.groups_per_batch]
    open_entries = (buffers.num_batches - buffers.first - len(closed)) * size
    held = sum(len(b) for b in buffers.by_version.values() if b not in closed)
    assert buffers.num_empty() == open_entries - held, "EMPTY entries are miscounted"


def check(state: State) -> None:
    """The whole coordinator: protocol, groups, queue and instances tell the same story."""
    check_buffers(state.buffers)
    entries = state.buffers.by_version.values()
    entered = {g for b in entries for g in [*b.reserved, *b.occupied]}
    occupied = {g for b in entries for g in b.occupied}
    assert entered == set(state.groups), "buffers and groups differ"
    assert occupied == {i for i, g in state.groups.items() if g.complete}
    assert state.num_inflight == len(state.groups) - len(occupied)
    members = [member for group in state.groups.values() for member in group.members]
    assert state.num_waiting_env == sum(m.state is MemberState.WAITING_ENV for m in members)
    assert set(state.prompts) == set(state.groups) | set(state.queue.unadmitted)
    _check_instances(state)
    _check_members(state)


def _check_instances(state: State) -> None:
    for name, instance in state.instances.items():
        assert not instance.stopping & set(instance.assigned), f"{name} has and stops the same"
        for where, there in (
            (MemberState.RUNNING, set(instance.assigned)),
            (MemberState.STOPPING, instance.stopping),
        ):
            for trajectory in there:
                member = state.member(trajectory)
                assert member is not None, f"{trajectory} of an ended group is on {name}"
                assert (member.state, member.instance) == (where, name), f"{trajectory} is not"
                assert member.version is not None
                assert member.version <= instance.version, f"{trajectory} runs under old weights"


def _check_members(state: State) -> None:
    waiting = {t for _, t in state.queue.partial()} | set(state.queue.new)
    for group_id, group in state.groups.items():
        version = state.buffers.version(group_id)
        for trajectory, member in zip(group.ids(), group.members, strict=True):
            assert (trajectory in waiting) == (member.state is MemberState.WAITING), f"{trajectory}"
            on_instance = member.state in ON_INSTANCE
            assert (member.instance is not None) == on_instance, f"{trajectory} is nowhere"
            if on_instance:
                instance = state.instances[str(member.instance)]
                assert trajectory in instance.assigned or trajectory in instance.stopping
            if member.version is not None:
                assert version <= member.version, f"{trajectory} is older than its group"
        count = len(group.rewarded())
        assert group.complete == (count == state.plan.num_generations), f"group {group_id}"
        assert group.num_alive() >= state.plan.num_generations, f"group {group_id} cannot end"
    assert all(t.group in state.groups for t in waiting), "what waits has ended"
