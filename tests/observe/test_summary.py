"""The summary is what the run directory says."""

import errno
import io
import json

import pytest
from rich.console import Console

from rhymeflow.core.events import VersionPublished
from rhymeflow.observe import inspect, query, summary
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.observe.runs import made, make_run, stored
from tests.refused import refusal


def test_summary_of_a_run(tmp_path):
    make_run(tmp_path)
    found = summary.write(tmp_path)
    # Groups 0..7 trained on; member 0 of step s began under version max(s - 1, 0).
    assert found.steps == 4
    assert found.seconds == 41.0
    assert found.trajectories == 16
    assert found.trained_tokens == sum(10 + g + 100 + g for g in range(8))
    assert found.generated_tokens == sum(10 + g + 100 + g for g in range(10))
    assert (found.eval_reward_before, found.eval_reward_after) == (0.25, 0.75)
    assert found.eval_rewards == ((0, 0.25), (4, 0.75))
    assert (found.reward_first, found.reward_last) == (0.1, 0.4)
    assert found.staleness == {0: 10, 1: 6}
    assert (found.staleness_max, found.staleness_mean) == (1, 6 / 16)
    assert found.endings == {"consumed": 8, "filtered": 0, "aborted": 1, "unfinished": 1}
    assert found.idle == pytest.approx({"rollout": 0.1, "learner": 0.3})
    drafts = found.drafts
    assert (
        drafts.mean_acceptance_length,
        drafts.acceptance_rate,
        drafts.time_saved,
    ) == pytest.approx((1190 / 783, (1190 - 783) / 832, 6.0))
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["staleness"] == {"0": 10, "1": 6}
    assert written["eval_rewards"] == [[0, 0.25], [4, 0.75]]
    console = Console(file=io.StringIO(), width=80)
    console.print(summary.panel(found, tmp_path))
    text = console.file.getvalue()
    for part in (
        "4 in 0:41", "0.250 before, 0.750 after", "mean 0.38, greatest 1",
        "16 trajectories, 936 tokens of 1,190 generated", "8 consumed, 1 aborted, 1 unfinished",
        "acceptance length 1.52, 49% accepted, 6.0 s saved", "rollout 10%, learner 30%",
        "rhymeflow inspect",
    ):  # fmt: skip
        assert part in text


def test_summary_of_a_run_that_did_nothing(tmp_path):
    assert "no such file" in refusal(summary.summarize, tmp_path)
    SqliteTrajectoryStore(tmp_path / "events.db").close()
    found = summary.write(tmp_path)
    assert (found.steps, found.trained_tokens, found.staleness_max) == (0, 0, None)
    assert found.eval_reward_before is found.eval_reward_after is found.drafts is None


@pytest.mark.parametrize(
    ("versions", "after", "said"),
    [
        ((0,), None, "0.250 before; no later version was evaluated"),
        ((0, 2), 2.25, "0.250 before, 2.250 after 2 of 3 steps  ▁█"),
    ],
)
def test_only_what_was_measured_is_said_to_be_after(tmp_path, versions, after, said):
    with stored(tmp_path) as store:
        store.record(2.0, [VersionPublished(3, "")])
    rows = [json.dumps({"step": each, "eval/reward": 0.25 + each}) for each in versions]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*rows, ""]))
    found = summary.summarize(tmp_path)
    assert (found.eval_reward_before, found.eval_reward_after) == (0.25, after)
    assert dict(summary._lines(found))["held-out reward"] == said


def test_a_verdict_says_since_when_it_holds(tmp_path, monkeypatch):
    """By what the run said, which may have been so before; it is judged once for a screen."""
    run_dir, judge = made(tmp_path / "run"), query.LiveVerdicts.after
    judged = []
    monkeypatch.setattr(
        query.LiveVerdicts, "after", lambda *args: judged.append(judge(*args)) or judged[-1]
    )
    assert summary.summarize(run_dir).verdicts[0]["since"] is None
    row = {"name": "reward function returns None", "time": 1.0}
    (run_dir / "verdicts.jsonl").write_text(
        "".join(json.dumps({"step": n, **row}) + "\n" for n in (2, 4))
    )
    assert summary._lines(summary.summarize(run_dir))[0][1].count("(since step 4); ") == 1
    console = Console(file=io.StringIO(), width=200)
    judged.clear()
    inspect.inspect(run_dir, inspect.Question(), console)
    assert "(since step 4): see which responses it judges so" in console.file.getvalue()
    assert len(judged) == 1


def test_a_summary_that_cannot_be_written_leaves_the_one_there_is(tmp_path, monkeypatch):
    make_run(tmp_path)
    summary.write(tmp_path)
    before = (tmp_path / "summary.json").read_bytes()

    def no_room(path, data):
        path.open("w").close()
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("pathlib.Path.write_bytes", no_room)
    with pytest.raises(OSError, match="No space"):
        summary.write(tmp_path)
    assert (tmp_path / "summary.json").read_bytes() == before
    assert not list(tmp_path.glob("*.unfinished"))
