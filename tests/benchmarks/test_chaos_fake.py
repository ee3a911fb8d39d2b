"""What `rhymeflow bench chaos_fake` reports of runs that are recorded; the runs: tests/fake_run."""

from __future__ import annotations

from benchmarks import chaos_fake


def test_the_record_counts_all_runs_and_messages_apart():
    parts = [
        chaos_fake.Part(0, 3, {"disk full": 600, "messages twice": 900}, [], 2.0),
        chaos_fake.Part(3, 5, {"disk full": 100, "learner killed": 300}, ["seed 4, x: Y: z"], 2.0),
    ]
    violations, faults = chaos_fake.targets(parts)
    assert (violations.value, violations.met) == (1, False)
    assert (faults.value, faults.met) == (1000, False)
    assert chaos_fake.rows(parts)[0] == {"fault": "disk full", "times": 700}
    assert "8 runs, each schedule in turn, 1000 faults, 250 a second" in chaos_fake.notes(parts)
