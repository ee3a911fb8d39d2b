"""A run of real processes in which each of them dies once: it goes on, and nothing is lost."""

import io
import os
import signal
from contextlib import closing
from itertools import chain
from pathlib import Path

import pytest
from rich.console import Console

from rhymeflow.core.events import InstanceLeft, LearnerReady, VersionPublished
from tests.runtime.logs import audit, check_replay, each_turn, reader, train
from tests.runtime.test_resume import resume
from tests.runtime.test_turns import check_conversations, config_of

pytestmark = pytest.mark.slow

VICTIMS = [
    ("rollout-0",),
    ("learner-rank-1",),
    ("reward", "environment", "history"),
    ("rollout-1",),
]
"""Those of a place after each version."""
STEPS = len(VICTIMS) + 2


def length(prompts, completions, completion_ids, **columns) -> list[float]:
    return [len(ids) / 100 for ids in completion_ids]


def test_each_worker_dies_once_and_the_run_goes_on(tmp_path):
    """With turns, drafts, weights by differences and two ranks, then on one."""
    config = config_of(
        tmp_path,
        "Slow",
        schedule={"name": "staleflow", "max_staleness": 2},
        rollout={"num_instances": 2, "max_completion_length": 120},
        drafting={"window": "cost"},
        weights={"transport": "delta"},
        reward={"functions": [{"function": f"{__file__}:length"}]},
        learner={"max_steps": STEPS, "num_ranks": 2},
        run={"token_details": True},
    )
    left, struck = list(VICTIMS), []

    def strike(controller):
        workers, published = controller.supervisor._workers, controller.training.published
        if published > len(VICTIMS) - len(left) and left and workers.keys() >= {*left[0]}:
            for name in left.pop(0):
                struck.append(workers[name].handle.pid)
                os.kill(struck[-1], signal.SIGKILL)

    console = Console(file=io.StringIO(), width=300)
    with each_turn(strike):
        assert train(config, console).steps == STEPS
    for pid in struck:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    for name in chain.from_iterable(VICTIMS):
        assert f"warning: {name} died (killed by SIGKILL)" in console.file.getvalue(), name
    check(config)
    with closing(reader(config)) as log:
        events = [each.event for each in log.events()]
        ((missing,),) = log.query(
            "SELECT COUNT(*) FROM trajectories t LEFT JOIN token_details d USING (group_id, member)"
            " WHERE t.trained IS NOT NULL AND d.logprobs IS NULL"
        )
    gone = [event.instance for event in events if isinstance(event, InstanceLeft)]
    assert gone == ["rollout-0", "rollout-1"]
    said = (event for event in events if isinstance(event, VersionPublished | LearnerReady))
    checksums = {(event.version, event.checksum) for event in said}
    assert missing == 0, "both ranks' token details are stored"
    assert len(checksums) == STEPS + 1, "a learner that was restored has what was published"
    summary = resume(tmp_path / "run", learner__num_ranks="1", learner__max_steps=str(STEPS + 1))
    assert summary.steps == STEPS + 1
    audit(tmp_path / "run")


def check(config) -> None:
    check_replay(config)
    audit(Path(config.run.output_dir))
    assert check_conversations(config) > 0
