"""A run that takes the time of a cluster: it waits, and all else is as in a plain run."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from rhymeflow.core.events import InstanceJoined, Tick, VersionPublished
from rhymeflow.observe import metrics
from rhymeflow.observe.inspect import Question, as_json
from tests.runtime.logs import reader, tokens, train
from tests.runtime.tiny import tiny_config

pytestmark = pytest.mark.slow

SCALE, TOKENS = 10.0, 20.0
COSTS = {
    **{"k1": 0.0, "k2": 0.005, "k3": 1e-4, "c": 0.0, "k4": 0.0, "prefill_token": 1e-5},
    **{"train_token": 0.002, "measure_token": 0.002, "train_step": 1.0, "push": 2.0, "pull": 1.0},
}
STEPS, DEVICES = 3, 2


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The configurations of a plain run and of the same one emulated."""
    directory = tmp_path_factory.mktemp("emulated")
    profile = directory / "fast.json"
    described = {"name": "fast", "description": "of a test", "source": "made up"}
    sizes = {"devices_per_instance": 1, "kv_capacity": 20_000}
    profile.write_text(json.dumps(described | COSTS | sizes))
    emulated = {
        "profile": str(profile),
        "devices": DEVICES,
        "time_scale": SCALE,
        "tokens_per_token": TOKENS,
        "reward_seconds": 1.0,
    }
    configs = {
        name: tiny_config(
            directory,
            rollout={"num_instances": DEVICES},
            learner={"max_steps": STEPS},
            schedule={"name": "synchronous", "max_staleness": None},
            run={"eval_steps": 0, "output_dir": str(directory / name)},
            emulation=section,
        )
        for name, section in {"plain": {}, "emulated": emulated}.items()
    }
    for config in configs.values():
        train(config)
    return configs


def rows(config):
    return {
        step: row
        for step, row in metrics.read(Path(config.run.output_dir)).items()
        if "grad_norm" in row
    }


def test_tokens_and_losses_are_those_of_the_plain_run_to_the_bit(runs):
    plain, emulated = (Path(config.run.output_dir) for config in runs.values())
    assert len(tokens(plain)) == 3 * 2 * STEPS
    assert tokens(plain) == tokens(emulated)
    pairs = zip(rows(runs["plain"]).values(), rows(runs["emulated"]).values(), strict=True)
    for one, other in pairs:
        for name in ("loss", "reward", "entropy", "grad_norm", "off_policy/mismatch_kl"):
            assert one[name] == other[name], name


def test_the_log_has_the_time_of_the_cluster(runs):
    """Steps take at least what the learner, and the longest response, are charged with."""
    config = runs["emulated"]
    with closing(reader(config)) as log:
        published = [at for _, at, event in log.events() if isinstance(event, VersionPublished)]
        longest = log.query(
            "SELECT trained, MAX(length) FROM trajectories WHERE trained IS NOT NULL GROUP BY 1"
        )
        charged = log.query(  # a group's prompt once
            "SELECT trained, SUM(tokens) FROM (SELECT trained, SUM(length)"
            " + LENGTH(prompt_tokens) / 4 AS tokens FROM trajectories JOIN groups USING (group_id)"
            " WHERE trained IS NOT NULL GROUP BY trained, group_id) GROUP BY 1"
        )
    training = {step: TOKENS * COSTS["train_token"] / DEVICES * n for step, n in charged}
    for step, length in longest[1:]:
        decoding = TOKENS * COSTS["k2"] * (length - 1)
        least = COSTS["train_step"] + COSTS["push"] + COSTS["pull"] + decoding + training[step] + 1
        assert published[step] - published[step - 1] > 0.95 * least
        row = rows(config)[step + 1]
        assert row["params/push_s"] >= COSTS["push"]
        assert row["params/pull_s"] >= COSTS["pull"]
        busy = (1 - row["idle/learner"]) * row["step_time"]
        assert busy == pytest.approx(COSTS["train_step"] + COSTS["push"] + training[step], rel=0.1)
    assert published[-1] == pytest.approx(rows(config)[STEPS]["time"], rel=0.05)


def test_nothing_is_routed_before_all_instances_have_joined(runs):
    for config in runs.values():
        with closing(reader(config)) as log:
            seen = [event for _, _, event in log.events()]
        joined = [i for i, event in enumerate(seen) if isinstance(event, InstanceJoined)]
        assert len(joined) == DEVICES
        assert not any(isinstance(event, Tick) for event in seen[joined[0] : joined[-1]])


def test_whoever_looks_at_the_run_is_told_whose_time_it_is(runs):
    run_dir = Path(runs["emulated"].run.output_dir)
    found = json.loads(as_json(run_dir, Question()))
    assert "emulated: 2 devices of" in found["emulated"]
    assert json.loads(as_json(Path(runs["plain"].run.output_dir), Question()))["emulated"] == ""
