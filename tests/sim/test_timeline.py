"""What is drawn is what happened: rows without gaps, loads, colours, a picture that opens."""

from itertools import pairwise

import matplotlib.image
import numpy as np
import pytest

from rhymeflow.config.load import build_config
from rhymeflow.sim import timeline as plot
from rhymeflow.sim.faults import Death
from rhymeflow.sim.simulate import run
from rhymeflow.sim.timeline import Span, Timeline
from rhymeflow.sim.workload import workload
from tests.sim.test_deaths import recovering


@pytest.fixture(scope="module")
def watched():
    """Three instances, one of which is away for a while, and a learner."""
    config = build_config(
        {
            "rollout.num_instances": 3,
            "rollout.max_completion_length": 100,
            "learner.max_steps": 4,
            "learner.groups_per_batch": 8,
            "simulation.faults.instance_seconds": 0.3,
        },
        where="test",
    )
    timeline = Timeline()
    with recovering(detection=0.0):
        found = run(config, workload(config, None), timeline=timeline, deaths=[Death(0.5, 1)])
    return timeline, found


def test_rows_say_what_was_done_when_and_versions_rise_by_pulls_only(watched):
    timeline, found = watched
    assert timeline.end == pytest.approx(found.seconds)
    rows = {row.name: list(row.with_idle(timeline.end)) for row in timeline.instances}
    assert sorted(rows) == ["rollout-0", "rollout-1", "rollout-1.1", "rollout-2"]
    for row in timeline.instances:
        for a, b in pairwise(row.spans):
            assert b.version == a.version or (b.kind == "pull" and b.version > a.version)
    assert {span.kind for span in timeline.learner.spans} == {"train", "push"}
    assert {span.kind for span in rows["rollout-0"]} == {"decode", "prefill", "pull", "idle"}
    assert rows["rollout-0"][0].start == 0
    assert rows["rollout-1"][-1].end == pytest.approx(0.5)
    assert rows["rollout-1.1"][0].start == pytest.approx(0.8)
    begin = found.step_seconds[0]
    inside = sum(s.end - s.start for s in timeline.learner.spans if s.start >= begin)
    assert 1 - inside / (found.seconds - begin) == pytest.approx(found.idle_learner)


def test_of_many_rows_evenly_chosen_ones_are_shown():
    timeline = Timeline()
    for i in range(1000):
        timeline.join(f"rollout-{i}", 0.0)
    chosen = [row.name for row in timeline.sample(10)]
    assert chosen == [f"rollout-{i}" for i in range(0, 1000, 100)]


def test_the_picture(tmp_path, watched):
    timeline, found = watched
    plot.draw(tmp_path / "timeline.png", timeline, found)
    image = matplotlib.image.imread(tmp_path / "timeline.png")
    assert image.shape[0] > 400
    assert image.shape[1] > 1000
    colour = plot.colours(found.steps)
    for span in (Span("decode", 0, 1, 1), Span("pull", 0, 1, 1), Span("idle", 0, 1, 1)):
        assert (np.abs(image[:, :, :3] - colour(span)).max(axis=2) < 0.02).sum() > 20, span
