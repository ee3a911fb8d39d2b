"""Calibration end to end on a tiny model: really measured, no claims on the numbers."""

import random
from dataclasses import replace

import pytest

from rhymeflow import profiles
from rhymeflow.calibration.calibrate import calibrate, fit_prefill, fit_still, fitted, workers
from rhymeflow.calibration.engine import EngineBench, EngineTimings, Prefill, State
from rhymeflow.calibration.fit import DecodeFit, DecodeTiming, LineFit
from rhymeflow.calibration.learner import SIZES, LearnerBench, LearnerTimings, TrainTiming, _batch
from rhymeflow.cli import main
from tests.runtime.tiny import tiny_config

FIT = DecodeFit(k1=1e-6, k2=0.01, k3=1e-4, c=0.005, k4=0.0)


def test_end_to_end(tmp_path):
    output = tmp_path / "mine.json"
    found = calibrate(tiny_config(tmp_path), output=output)
    profile = profiles.load(str(output))
    assert profile == found.profile
    assert profile.name == "mine"
    assert profile.kv_capacity == 8 * (5 + 12)
    cost = profile.cost(1)
    assert 0 < cost.iteration(1, 20) <= cost.iteration(8, 160) < 1
    assert 0 < cost.train_token * 100 + cost.train_step < 10
    assert 0 < cost.push < 1
    assert 0 < cost.pull < 1
    text = found.text()
    assert "decode iteration" in text
    assert f"--schedule.cost_model {output}" in text
    assert "not saved" not in text
    assert "was not saved: --output FILE.json" in replace(found, output=None).text()


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    code = main(["calibrate", "demo", "--model.name", str(tmp_path / "none")])
    assert code == 2
    assert "model.name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "said"),
    [("a.txt", "ends in .json"), ("a.json", "is a directory"), ("b/c.json", "cannot be written")],
)
def test_a_profile_that_could_not_be_saved_is_not_measured(tmp_path, capsys, output, said):
    (tmp_path / "a.json").mkdir()
    (tmp_path / "b").write_text("")
    assert main(["calibrate", "demo", "--output", str(tmp_path / output)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_the_workers_are_the_runs(tmp_path):
    config = tiny_config(
        tmp_path,
        rollout={"num_instances": 2, "num_threads": 3, "cpus": [[0], [1]]},
        learner={"num_threads": 2, "cpus": [4, 5]},
    )
    assert [(job.make, job.num_threads, job.cpus) for job in workers(config)] == [
        (EngineBench, 3, (0,)),
        (EngineBench, 3, (1,)),
        (LearnerBench, 2, (4, 5)),
    ]


def made(prefills=(), noise=0.0):
    """Timings of a machine that is just what `FIT` says."""
    chance = random.Random(0)
    points = [
        DecodeTiming(
            n, n * length, FIT.seconds(n, n * length) * chance.uniform(1 - noise, 1 + noise)
        )
        for n in (1, 8, 32, 64, 128)
        for length in (10, 400)
    ]
    return EngineTimings(points, points[1::3], list(prefills), [0.02, 0.03, 0.9], 1000, 0.01)


def prefill(tokens, each, iterations=((0, 0), (4, 100))):
    return Prefill(tokens, each * tokens + sum(FIT.seconds(*i) for i in iterations), iterations)


def test_prefill_is_what_is_left_when_iterations_are_taken_off():
    assert fit_prefill([prefill(100, 2e-4)], FIT) == pytest.approx(2e-4)
    total = fit_prefill([prefill(100, 2e-4), prefill(300, 4e-4)], FIT)
    assert total == pytest.approx(3.5e-4)
    assert fit_prefill([Prefill(100, 1e-6, ((0, 0),))], FIT) == 0


def test_what_moves_nothing_costs_no_less_than_nothing():
    timings = [TrainTiming(100, 0.7), TrainTiming(300, 1.1)]
    assert fit_still(timings, LineFit(1e-3, 0.5)) == LineFit(pytest.approx(2e-3), 0.5)
    assert fit_still(timings, LineFit(1e-3, 2.0)).each == 0


def test_a_profile_has_what_was_measured(tmp_path):
    trained = [TrainTiming(n, 1e-3 * n + 0.5) for n in (100, 400, 900)]
    still = [TrainTiming(n, 2e-4 * n + 0.5) for n in (100, 300)]
    timings = LearnerTimings(trained, trained[:1], still, [0.1, 0.2, 0.3], 0.25)
    config = tiny_config(tmp_path)
    found = fitted(config, "x", "a machine", made([prefill(100, 2e-4)]), timings)
    profile = found.profile
    assert profile.k1 == pytest.approx(1e-6, rel=1e-3)
    assert profile.prefill_token == pytest.approx(2e-4, rel=0.01)
    assert profile.train_token == pytest.approx(1e-3)
    assert profile.train_step == pytest.approx(0.5)
    assert profile.measure_token == pytest.approx(2e-4)
    assert (profile.push, profile.pull) == (0.2, 0.03)
    assert "a machine" in profile.description
    assert "held a worker up 25% of the time" in found.text()
    assert {row.quantity: row.fitted.mean < 0.01 for row in found.rows[:3]} == {
        "decode iterations": True,
        "prefill": True,
        "training steps": True,
    }


def test_errors_are_reported_as_they_are(tmp_path):
    one, other = TrainTiming(100, 1.0), TrainTiming(100, 2.0)
    timings = LearnerTimings([one] * 2, [other], [one], [0.1], 0.0)
    found = fitted(tiny_config(tmp_path), "x", "m", made([prefill(9, 1e-3)], noise=0.2), timings)
    rows = {row.quantity: row for row in found.rows}
    assert 0.02 < rows["decode iterations"].fitted.mean < 0.2
    assert rows["training steps"].held_out.mean == pytest.approx(0.5)
    assert "held out 50.0%" in found.profile.source
    assert "held a worker up" not in found.text()


def test_states_are_those_that_were_asked_for(tmp_path):
    bench = EngineBench(tiny_config(tmp_path).model_dump_json())
    prefilled, found = bench._descend(State(0.5, 0.5))
    assert [timing.n for timing in found] == bench.sizes == [8, 6, 4, 3, 2, 1]
    assert prefilled.iterations[0] == (0, 0)
    assert not bench.engine.has_work
    prompts = sum(len(prompt) for prompt in bench.prompts[:3])
    assert (prefilled.tokens - prompts) / 8 == pytest.approx(0.5 * bench.longest, abs=1)
    for timing in found:
        length = timing.kv_tokens / timing.n
        assert 6 <= length <= 6 + 12 + bench.steps * len(bench.sizes) + 4


def test_spread_responses_are_mostly_short_and_no_state_is_taken_in_twice(tmp_path):
    config = tiny_config(tmp_path, rollout={"max_num_seqs": 256, "num_generations": 4})
    bench = EngineBench(config.model_dump_json())
    bench.longest = 1000
    once, again = ([], [])
    for found in (once, again):
        requests = list(bench._requests(State(0.0, 0.8), random.Random(bench._descents)))
        found += [tuple(request.prompt_ids) for request in requests]
        lengths = sorted(len(request.tokens) for request in requests)
        assert 0.15 * 800 < sum(lengths) / len(lengths) < 0.35 * 800
        assert lengths[0] < 10 < 600 < lengths[-1] <= 1.05 * 800
        bench._descents += 1
    assert once != again


def test_a_batch_is_of_whole_groups_with_something_to_learn_or_nothing(tmp_path):
    config = tiny_config(tmp_path, learner={"groups_per_batch": 8, "num_minibatches": 4})
    for size in SIZES:
        batch = list(_batch(config, size, [[5, 6, 7]] * 8, 16))
        groups = {sample.group for sample in batch}
        assert len(groups) % 4 == 0
        assert len(batch) == 3 * len(groups)
        assert all(1 <= len(sample.completion_ids) <= 12 for sample in batch)
        for group in groups:
            rewards = {s.reward for s in batch if s.group == group}
            assert len(rewards) == (1 if size.still else 2)
