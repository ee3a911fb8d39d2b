"""Shares of a step's time, also with instances that come and go."""

import pytest

from rhymeflow.histospec.draft import DraftStats
from rhymeflow.runtime.throughput import Throughput
from rhymeflow.workers.messages import Part, Status


def status(tokens, busy, saved=0.0):
    drafts = DraftStats(saved_seconds=saved)
    return Status(2, 1, tokens, busy, drafts)


def part(count, steps, drafted):
    return Part((0, 1), 0, 0, steps, drafted, [7] * count, [0.0] * count)


def begun(now=0.0, *, trained=0.0, has_drafts=False):
    throughput = Throughput(has_drafts=has_drafts)
    throughput.begin(now, {"cpu": 0.0}, trained)
    return throughput


def end(throughput, now, trained=0.0):
    return throughput.end_step(
        now,
        trained=trained,
        learner_seconds=1.0,
        coordination_seconds={"coordinator": 0.0, "store": 0.0, "cpu": 0.0},
    )


def test_what_an_instance_did_counts_when_it_is_gone():
    throughput = begun()
    throughput.statuses["a"], throughput.statuses["b"] = status(100, 1.0), status(50, 1.0)
    assert (throughput.running, throughput.waiting) == (4, 2)
    assert end(throughput, 2.0)["rollout/tokens_per_s"] == 75.0
    throughput.statuses["a"] = status(140, 2.0)
    throughput.leave("a")
    throughput.leave("never heard of")
    assert (throughput.running, throughput.waiting) == (2, 1)
    throughput.statuses["a.1"] = status(20, 0.5)
    row = end(throughput, 4.0)
    assert row["rollout/tokens_per_s"] == 30.0
    assert row["idle/rollout"] == pytest.approx(1 - 1.5 / 2 / 2)


@pytest.mark.parametrize("step", [0.05, 0.3, 2.0])
def test_rates_of_short_steps_are_of_the_last_second(step):
    """An instance that makes 1,000 tokens a second and saves a tenth of its time, by reports."""
    throughput = begun(5.0, has_drafts=True, trained=500.0)
    rows = []
    for number in range(1, 101):
        reported = (number * step) // 0.25 * 0.25
        throughput.statuses["a"] = status(int(1000 * reported), 0.9 * reported, 0.1 * reported)
        rows.append(end(throughput, 5.0 + number * step, trained=500.0 + 100.0 * number))
        assert throughput.trained_tokens_per_s == pytest.approx(100.0 / step)
    settled = rows[int(1 / step) + 1 :]
    rates = [row["rollout/tokens_per_s"] for row in settled]
    assert min(rates) > 700, "no step makes nothing because none of its own was reported"
    assert max(rates) < 1300, "and none what another made"
    shares = [row["draft/time_saved_share"] for row in settled]
    assert shares == pytest.approx([0.1] * len(shares))
    saved = sum(row["draft/time_saved"] for row in rows)
    assert saved == pytest.approx(0.1 * reported), "seconds are of the step alone, and add up"


def test_drafts_are_counted_by_step_and_by_what_they_are_shares_of():
    throughput = begun(has_drafts=True)
    throughput.statuses["a"], throughput.statuses["b"] = status(10, 1.0, 0.5), status(10, 2.0, 0.5)
    for generated in (part(6, 2, 8), part(4, 3, 2)):
        throughput.add(generated)
    row = end(throughput, 4.0)
    assert row["draft/mean_acceptance_length"] == 2.0
    assert row["draft/acceptance_rate"] == 0.5
    assert row["draft/time_saved"] == 1.0
    assert row["draft/time_saved_share"] == 0.25, "4 seconds without drafts"
    throughput.leave("b")
    throughput.statuses["a"] = status(20, 3.0, 0.0)
    throughput.add(part(3, 3, 0))
    row = end(throughput, 8.0)
    assert row["draft/mean_acceptance_length"] == 1.0
    assert "draft/acceptance_rate" not in row, "a share of nothing"
    assert row["draft/time_saved"] == -0.5, "drafts that cost more than they save say so"
    assert row["draft/time_saved_share"] == pytest.approx(-0.5 / 1.5)
