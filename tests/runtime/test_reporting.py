"""What is shown of a step that has ended."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from rhymeflow.config.load import build_config
from rhymeflow.observe.progress import Progress, ProgressState
from rhymeflow.runtime.reporting import Reporter
from rhymeflow.workers.messages import BatchTrained, VersionPublished


class Shown(Progress):
    """Keeps the state that it is shown last."""

    state: ProgressState

    def update(self, state: ProgressState) -> None:
        self.state = state


@pytest.mark.parametrize(("staleness", "expected"), [(2.0, "elsewhere"), (3.0, "bound")])
def test_what_limits_the_run_is_found_at_its_bound(staleness: float, expected: str) -> None:
    now = 0.0
    config = build_config({"schedule.name": "staleflow", "schedule.max_staleness": 3}, where="test")
    progress = Shown(Console(file=io.StringIO()))
    reporter = Reporter(
        config,
        SimpleNamespace(write=lambda *row: None),  # type: ignore[arg-type]
        progress,
        clock=lambda: now,
    )
    reporter.begin_training()
    assert progress.state.limit is None
    metrics = {"reward": 0.5, "num_tokens": 10.0, "staleness/mean": 1.0, "staleness/max": staleness}
    for step in (1, 2):
        now = 10.0 * step  # nothing is generated, and a second of it is training
        reporter.end_step(
            BatchTrained(step - 1, metrics, 0.5),
            VersionPublished(step, "0", 0.5),
            {},
            coordinator=0.0,
            store=0.0,
        )
    reporter.show()
    limit = progress.state.limit
    assert limit is not None
    assert (limit.idle_rollout, limit.idle_learner) == (1.0, pytest.approx(0.9))
    assert limit.verdict == expected
