"""Scheduler properties, on plain sequences: no torch, no model."""

from itertools import combinations, takewhile

from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.engine.base import NoiseKey, Request, Sampling, Segment
from rhymeflow.engine.native.scheduler import MIN_SHARED, Scheduler
from rhymeflow.engine.native.sequence import Sequence

SEGMENT = Segment(0, 0, "a")


def make_sequence(name, prompt, max_new_tokens, is_urgent=False):
    how = Sampling(1.0, 1.0, 0, max_new_tokens, frozenset())
    request = Request(name, list(prompt), NoiseKey(0, 0, 0), how, is_urgent=is_urgent)
    return Sequence(request, 0, list(prompt), tuple(prompt))


plain = st.tuples(st.integers(0, 3), st.integers(1, 30)).map(lambda p: (p[0],) * p[1])
alike = st.tuples(st.integers(28, 40), plain).map(lambda p: (*range(10, 10 + p[0]), *p[1]))
prompts = plain | alike
jobs = st.lists(
    st.tuples(prompts, st.integers(1, 12), st.integers(0, 20), st.booleans()), max_size=14
)


@given(
    jobs, st.integers(1, 5), st.integers(1, 25), st.integers(1, 130),
    st.sets(st.integers(0, 60), max_size=4),
)  # fmt: skip
def test_everything_finishes_within_limits(
    jobs, max_num_seqs, max_prefill_tokens, kv_capacity, new_weights
):
    scheduler = Scheduler(
        max_num_seqs=max_num_seqs, max_prefill_tokens=max_prefill_tokens, kv_capacity=kv_capacity
    )
    arrivals = sorted(enumerate(jobs), key=lambda job: job[1][2])
    todo = [
        (when, make_sequence(i, prompt, new, is_urgent))
        for i, (prompt, new, when, is_urgent) in arrivals
    ]
    expected, started, in_cache, step = len(todo), [], {}, 0
    finished = []
    while todo or scheduler.running or scheduler.waiting or scheduler.urgent:
        while todo and todo[0][0] <= step:
            scheduler.submit(todo.pop(0)[1])
        if step in new_weights:
            for sequence in (*scheduler.running, *scheduler.waiting):  # one evicted kept its own
                sequence.cached = 0
            in_cache.clear()
        ready = [s for s in scheduler.running if s.remaining == 1]
        waiting = (*scheduler.waiting, *scheduler.urgent)
        before = {s: s.cached for s in (*scheduler.running, *waiting)}
        had_places = set(scheduler.running)
        plan = scheduler.plan()
        assert had_places - set(scheduler.running) <= set(plan.evicted)
        assert not set(plan.evicted) & set(scheduler.running)
        made_way = [s for s in plan.evicted if s.request.is_urgent]
        others = [s for s in scheduler.running if not s.request.is_urgent]
        assert not made_way or not others, "urgent ones make way for each other only"
        assert all(s.cached == 0 for s in plan.dropped)
        for sequence in plan.dropped:
            before[sequence] = 0
            in_cache.pop(sequence, None)
        ready = [s for s in ready if s not in plan.evicted]
        started += [s for s in scheduler.running if s not in started]
        check_plan(scheduler, plan, ready, before, in_cache)
        scheduler.advance(plan.work)
        for sequence, _, _ in plan.work:
            in_cache[sequence] = sequence.cached
            if sequence.remaining == 0:
                sequence.extend([5], [0.0], SEGMENT)
        done = [s for s in scheduler.running if s.request.finish_reason()]
        finished += done
        scheduler.remove(done)
        for sequence in done:
            in_cache.pop(sequence)
        step += 1
        assert step < 5000, "no progress"
    assert len(finished) == expected
    for is_urgent in (False, True):
        in_order = [i for i, (*_, urgent) in arrivals if urgent == is_urgent]
        assert [s.request.id for s in started if s.request.is_urgent == is_urgent] == in_order


def check_plan(scheduler, plan, ready, before, in_cache):
    running = scheduler.running
    assert len(running) <= scheduler.max_num_seqs
    used = sum(s.needed for s in running) + sum(s.held for s in scheduler.waiting)
    assert plan.room == scheduler.kv_capacity - used
    assert plan.room >= 0 or (len(running) == 1 and used == running[0].needed)
    queue = scheduler.waiting or scheduler.urgent
    if queue and len(running) < scheduler.max_num_seqs and not plan.dropped:
        assert queue[0].needed - queue[0].held + len(running) > plan.room, "there is room for it"
    num_urgent = sum(s.request.is_urgent for s in running)
    assert num_urgent >= scheduler.urgent_places or not scheduler.urgent or plan.dropped
    if running:
        assert plan.work
    for share in plan.prefix_copies:
        donor, sequence = share.donor.prompt, share.sequence.prompt
        assert donor[: share.length] == sequence[: share.length]
        assert donor == sequence or share.length >= MIN_SHARED
        assert before[share.sequence] == 0
        assert share.length < len(share.sequence.prompt)
        # the donor's tokens were in the cache before this iteration
        assert in_cache[share.donor] >= share.length
        in_cache[share.sequence] = share.length
    worked = [sequence for sequence, _, _ in plan.work]
    assert len(set(worked)) == len(worked)
    assert set(ready) <= set(worked) <= set(running)
    prefill = 0
    for sequence, num_new, _ in plan.work:
        assert 1 <= num_new <= sequence.remaining
        assert sequence.cached == in_cache.get(sequence, 0)
        prefill += num_new if sequence.remaining > 1 else 0
    assert prefill <= scheduler.max_prefill_tokens
    # nobody computes a long beginning of a prompt that another is computing or has computed
    beginning = [s for s, _, _ in plan.work if before[s] == 0 and s.cached < len(s.prompt) - 1]
    for one, other in combinations(beginning, 2):
        length = min(len(one.prompt), len(other.prompt)) - 1
        same = takewhile(lambda i: one.prompt[i] == other.prompt[i], range(length))  # noqa: B023
        common = len([*same])
        is_long = one.prompt == other.prompt or common >= MIN_SHARED
        copied = max(one.cached, other.cached)
        assert not is_long or copied >= common or (copied and copied + MIN_SHARED > common)


def test_urgent_ones_take_half_of_the_places_at_once_and_no_more_while_others_wait():
    scheduler = Scheduler(max_num_seqs=4, max_prefill_tokens=100, kv_capacity=1000)
    others = [make_sequence(i, (i, i), 9) for i in range(5)]
    for sequence in others:
        scheduler.submit(sequence)
    scheduler.plan()
    urgent = [make_sequence(10 + i, (9, i), 9, is_urgent=True) for i in range(5)]
    for sequence in urgent:
        scheduler.submit(sequence)
    plan = scheduler.plan()
    assert plan.evicted == [others[3], others[2]], "what started last makes way"
    assert scheduler.running == [*others[:2], *urgent[:2]]
    assert list(scheduler.waiting) == others[2:], "and is the first to go on"
    scheduler.remove([urgent[0], others[0]])
    assert scheduler.plan().evicted == []
    assert scheduler.running == [others[1], urgent[1], urgent[2], others[2]]
    scheduler.remove([others[3], others[4], others[1]])
    scheduler.plan()
    assert scheduler.running == [urgent[1], urgent[2], others[2], urgent[3]], "nobody else waits"


def test_what_started_last_makes_way_for_the_cache_of_the_others():
    scheduler = Scheduler(max_num_seqs=4, max_prefill_tokens=100, kv_capacity=20)
    first, second, third = (make_sequence(i, (i,) * 5, 9) for i in range(3))
    for sequence in (first, second, third):
        scheduler.submit(sequence)
    plan = scheduler.plan()
    assert scheduler.running == [first, second, third]
    assert plan.room == 5
    for _ in range(2):
        for sequence, _, _ in plan.work:
            scheduler.advance([(sequence, sequence.remaining, None)])
            sequence.extend([5], [0.0], SEGMENT)
        plan = scheduler.plan()
    assert (plan.evicted, plan.dropped) == ([third], [third])
    assert (third.cached, plan.room) == (0, 6)
    assert scheduler.plan().evicted == []
    scheduler.remove([first])
    scheduler.plan()
    assert scheduler.running == [second, third], "and it goes on with what it had"
    assert third.needed == 7


def test_a_long_beginning_is_computed_once_whatever_follows_it():
    scheduler = Scheduler(max_num_seqs=4, max_prefill_tokens=1000, kv_capacity=1000)
    system = tuple(range(100))
    prompts = (*system, 1, 2, 3), (*system, 4, 5), (*system, 4, 5, 6, 7), (9, 8, 7)
    for number, prompt in enumerate(prompts):
        scheduler.submit(make_sequence(number, prompt, 9))
    computed = []
    for _ in range(3):
        plan = scheduler.plan()
        computed.append({s.request.id: (s.cached, n) for s, n, _ in plan.work})
        scheduler.advance(plan.work)
        for sequence, _, _ in plan.work:
            sequence.extend([5], [0.0], SEGMENT)
    assert computed[0] == {0: (0, 103), 3: (0, 3)}
    assert computed[1] == {0: (103, 1), 1: (100, 2), 2: (100, 4), 3: (3, 1)}
