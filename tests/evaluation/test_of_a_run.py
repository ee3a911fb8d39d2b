"""What a run says of its held-out prompts, `rhymeflow eval` says of its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rhymeflow import cli


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["demo", "guess"])
def test_the_figure_of_a_checkpoint_is_the_runs(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    sizes = ["--data.size", "8", "--data.eval_size", "24", "--learner.groups_per_batch", "2"]
    sizes += ["--learner.max_steps", "2", "--run.report_to", "[]", "--rollout.num_generations", "4"]
    assert cli.main(["train", recipe, "--run.output_dir", str(run), *sizes]) == 0
    capsys.readouterr()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    said = [line["eval/reward"] for line in map(json.loads, lines) if "eval/reward" in line]
    assert cli.main(["eval", str(run / "checkpoints" / "step-2"), "--json"]) == 0
    suite = json.loads(capsys.readouterr().out)["suites"]["held_out"]
    assert suite["prompts"] == 24
    assert suite["avg@1"] == pytest.approx(said[-1], abs=1e-9)
