"""Made-up runs for the browser: conversations with turns, and what a hostile policy may write."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rhymeflow.core.events import InstanceJoined, LearnerReady
from rhymeflow.core.types import TrajectoryId
from tests.export.made import MadeRun, model
from tests.store.stores import finished, segment

HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"


def conversation(run_dir: Path, model_dir: Path) -> None:
    """Three groups; response 0.0 has two turns, versions and instances, and all that is known of
    tokens."""
    made = MadeRun(run_dir, model(model_dir))
    made.store.record(0.5, [LearnerReady(0), InstanceJoined("rollout-0", 0, 8, 100)])
    first = TrajectoryId(0, 0)
    made.group(0, "first?", row=4)
    for start, text, version, instance, drafted, accepted in (
        (0, "ab", 1, "rollout-0", 3, b"\0\1"),
        (4, "c", 2, "rollout-1", 0, b"\0"),
    ):
        by = {"version": version, "instance": instance, "drafted": drafted, "accepted": accepted}
        logprobs = [-0.5, -1.0][: len(text)]
        segment(made.store, first, made.ids(text), start=start, logprobs=logprobs, **by)
    made.store.put_observed(first, start=2, version=1, tokens=made.ids("=3"))
    finished(made.store, first, 5, 1.0, text="ab=3c", right=1.0)
    made.response(0, 1, "abd", 0.0)
    made.store.put_consumed(0, version=3, members=(0, 1))
    learner = np.array([-0.5, -1.5, 0, 0, -0.25], "<f4")
    made.store.put_token_details(first, logprobs=learner.tobytes(), flags=bytes([0, 1, 4, 4, 0]))
    for group, prompt in ((1, "second?"), (2, "third?")):
        made.group(group, prompt)
        made.response(group, 0, "x")
        made.response(group, 1, "y")
        made.store.put_consumed(group, version=3, members=(0, 1))
    made.close()


def hostile(run_dir: Path, model_dir: Path) -> None:
    """One group, all of whose texts are HTML."""
    made = MadeRun(run_dir, model_dir)
    made.store.record(0.5, [InstanceJoined(HOSTILE, 0, 8, 100)])
    made.group(0, HOSTILE)
    made.response(0, 0, "abc")
    made.store.put_text(TrajectoryId(0, 0), HOSTILE)
    made.close()
