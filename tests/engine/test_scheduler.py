"""Scheduler properties, on plain sequences: no torch, no model."""

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.engine.base import NoiseKey, Request, Sampling, Segment
from rhymeflow.engine.native.scheduler import Scheduler
from rhymeflow.engine.native.sequence import Sequence

SEGMENT = Segment(0, 0, "a")


def make_sequence(name, prompt, max_new_tokens):
    how = Sampling(1.0, 1.0, 0, max_new_tokens, frozenset())
    request = Request(name, list(prompt), NoiseKey(0, 0, 0), how)
    return Sequence(request, 0, list(prompt), tuple(prompt))


prompts = st.tuples(st.integers(0, 3), st.integers(1, 30)).map(lambda p: (p[0],) * p[1])
jobs = st.lists(st.tuples(prompts, st.integers(1, 12), st.integers(0, 20)), max_size=14)


@given(jobs, st.integers(1, 5), st.integers(1, 25), st.sets(st.integers(0, 60), max_size=4))
def test_everything_finishes_within_limits(jobs, max_num_seqs, max_prefill_tokens, new_weights):
    scheduler = Scheduler(max_num_seqs=max_num_seqs, max_prefill_tokens=max_prefill_tokens)
    arrivals = sorted(enumerate(jobs), key=lambda job: job[1][2])
    todo = [(when, make_sequence(i, prompt, new)) for i, (prompt, new, when) in arrivals]
    expected, started, in_cache, step = len(todo), [], {}, 0
    finished = []
    while todo or scheduler.running or scheduler.waiting:
        while todo and todo[0][0] <= step:
            scheduler.submit(todo.pop(0)[1])
        if step in new_weights:
            for sequence in scheduler.running:
                sequence.cached = 0
            in_cache.clear()
        ready = [s for s in scheduler.running if s.remaining == 1]
        before = {s: s.cached for s in (*scheduler.running, *scheduler.waiting)}
        plan = scheduler.plan()
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
    assert [s.request.id for s in started] == [i for i, _ in arrivals]


def check_plan(scheduler, plan, ready, before, in_cache):
    running = scheduler.running
    assert len(running) <= scheduler.max_num_seqs
    assert len(running) == scheduler.max_num_seqs or not scheduler.waiting
    if running:
        assert plan.work
    for share in plan.prefix_copies:
        assert share.donor.prompt == share.sequence.prompt
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
    # nobody computes a prompt that another is computing or has computed
    beginning = [s.prompt for s, _, _ in plan.work if before[s] == 0 and s.cached == 0]
    long = [prompt for prompt in beginning if len(prompt) > 1]
    assert len(set(long)) == len(long)


def test_removing_waiting_and_running():
    scheduler = Scheduler(max_num_seqs=1, max_prefill_tokens=8)
    sequences = [make_sequence(i, (i, i), 3) for i in range(4)]
    for sequence in sequences:
        scheduler.submit(sequence)
    scheduler.plan()
    scheduler.remove([sequences[0], sequences[2]])
    assert scheduler.running == []
    assert list(scheduler.waiting) == [sequences[1], sequences[3]]


def test_scheduler_imports_no_torch():
    code = "import sys, rhymeflow.engine.native.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
