"""Whole runs that draft: fewer iterations; that tokens stay is tested with turns."""

from contextlib import closing
from pathlib import Path

import pytest

from rhymeflow.histospec.index import Index
from rhymeflow.observe import metrics
from rhymeflow.runtime.controller import Controller
from tests.runtime.logs import each_turn, reader, tokens, train
from tests.runtime.tiny import save_prompts, tiny_config, until

pytestmark = pytest.mark.slow

STEPS = 6


def wait_for_indexes(controller: Controller) -> None:
    while any(node.index is None for node in controller.history._nodes.values()):
        controller._receive(controller.supervisor.wait(0.1))


@pytest.fixture(autouse=True, scope="module")
def history_is_ready():
    """Nothing is generated before: on a machine without compiled code that takes longest."""
    with each_turn(wait_for_indexes, first=True):
        yield


def config_for(directory: Path, **drafting):
    """Two epochs of six prompts. Synchronous, so that two runs train on the same in turn."""
    config = tiny_config(
        directory,
        rollout={"max_completion_length": 40},
        learner={"max_steps": STEPS, "learning_rate": 1e-3},
        schedule={"name": "synchronous", "max_staleness": None},
        run={"eval_steps": 1, "eval_temperature": 1.0},
        drafting=drafting,
    )
    save_prompts(directory / "prompts.jsonl", count=6)
    return config


def figures(config, where: str = "TRUE") -> tuple[int, int, int]:
    """Tokens, the iterations that generated them, and drafted tokens."""
    with closing(reader(config)) as log:
        (found,) = log.query(
            "SELECT SUM(LENGTH(tokens) / 4), SUM(steps), SUM(drafted)"
            f" FROM segments JOIN groups USING (group_id) WHERE suite IS NULL AND {where}"
        )
    return found


def test_figures_are_where_they_are_looked_for_and_another_run_begins_with_the_history(tmp_path):
    """The other has the same seed, weights and prompts: the same is said again."""
    (tmp_path / "earlier").mkdir()
    earlier = config_for(tmp_path / "earlier", window="aimd")
    summary = train(earlier)
    made_in_all, steps, proposed = figures(earlier)
    assert proposed > made_in_all - steps > 0
    rows = metrics.read(Path(earlier.run.output_dir))
    for name in ("mean_acceptance_length", "acceptance_rate", "time_saved", "history_tokens"):
        assert f"draft/{name}" in rows[STEPS], name
    assert summary.drafts.mean_acceptance_length == pytest.approx(made_in_all / steps)
    assert summary.drafts.acceptance_rate == pytest.approx((made_in_all - steps) / proposed)

    config = config_for(tmp_path, window="aimd", history_run=earlier.run.output_dir)
    known = tokens(Path(earlier.run.output_dir), "TRUE")

    def wait_for_history(controller):
        wait_for_indexes(controller)
        index = Index.attach(controller.history._nodes[""].index)
        until(lambda: index.num_responses >= len(known))

    with each_turn(wait_for_history, first=True):
        train(config)
    assert tokens(Path(config.run.output_dir), "TRUE") == known
    found, steps, _ = figures(config, "version = 0")
    assert found > 2 * steps, "before there was an epoch of its own"
    found_before, steps_before, _ = figures(earlier, "version = 0")
    assert found / steps > 1.5 * found_before / steps_before
