"""The time of a cluster in a run of this machine: what is charged, waited for and refused."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from rhymeflow import emulation, profiles
from rhymeflow.config.load import read_config
from rhymeflow.core.cost import CostModel
from rhymeflow.emulation import Pace
from rhymeflow.models.attention import body_of
from tests.engine.drafters import FakeDrafter, line
from tests.engine.models import make_engine, make_requests, run, sampling, tiny_model
from tests.learner.builders import made_up_batch, tiny_learner
from tests.learner.builders import tiny_model as tiny_policy
from tests.refused import refusal

COST = CostModel(1e-6, 0.01, 1e-4, 0.009, 1e-3, 1e-4, 1e-3, 5e-4, 0.5, 3.0, 2.0)


class Machine:
    """A clock that only sleeping and `work` advance."""

    def __init__(self):
        self.now, self.slept = 100.0, []

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds

    work = sleep


@pytest.fixture
def machine():
    return Machine()


@pytest.fixture
def pace(machine):
    return Pace(COST, 10.0, clock=machine.clock, sleep=machine.sleep)


SECOND = {"decoded": 0, "prefilled": 9_890, "cached": 0, "searched": 0}
"""What takes a second."""


def ends(pace, *, is_idle=False):
    """An iteration that has begun and lasts a second."""
    assert pace.charge(**SECOND) == pytest.approx(1.0)
    pace.end(is_idle=is_idle)


def emulated(**fields):
    given = {"profile": "qwen3-30b-a3b-h20", "devices": "16"} | fields
    return read_config("demo", {f"emulation.{name}": value for name, value in given.items()})


# -- the pace of a worker --------------------------------------------------------------------------


def test_iterations_last_as_long_as_the_model_says_in_time_of_this_machine(pace, machine):
    for worked in (0.01, 0.07, 0.0):
        pace.begin()
        machine.now += worked
        ends(pace)
    assert machine.now == pytest.approx(100.3)
    assert (pace.modelled, pace.behind) == pytest.approx((3.0, 0.0))


def test_an_iteration_that_is_late_is_caught_up(pace, machine):
    for worked in (0.25, 0.01, 0.01):
        pace.begin()
        machine.now += worked
        ends(pace)
    assert machine.now == pytest.approx(100.3)
    assert pace.behind == 0.0


def test_what_is_too_late_to_be_caught_up_is_said(pace, machine):
    pace.begin()
    machine.now += 1.35  # 1.25 s late, of which a quarter of a second can be caught up
    ends(pace)
    pace.begin()
    assert pace.behind == pytest.approx(10.0)
    assert machine.slept == []


def test_an_idle_worker_neither_saves_time_nor_owes_it(pace, machine):
    pace.begin()
    machine.now += 0.12
    ends(pace, is_idle=True)
    assert pace.behind == pytest.approx(0.2)
    machine.now += 50.0
    pace.begin()
    ends(pace)
    assert machine.now == pytest.approx(150.22)
    assert pace.behind == pytest.approx(0.2)


def test_a_pull_lasts_as_long_as_the_model_says(pace, machine):
    began = pace.now()
    machine.now += 0.05
    pace.hold(2.0, began)
    assert machine.now == pytest.approx(100.2)
    began = pace.now()
    machine.now += 0.5
    pace.hold(2.0, began)
    assert machine.now == pytest.approx(100.7)
    assert pace.behind == pytest.approx(3.0)
    assert pace.behind_share() == pytest.approx(3 / 4)
    assert pace.behind_share() == 0.0


def test_training_lasts_as_long_as_its_tokens_and_is_counted_anew(pace, machine):
    charged = Counter({"train_token": 1000, "measure_token": 600})
    pace.hold_training(charged, pace.now(), num_steps=1)
    assert machine.now == pytest.approx(100 + (1.0 + 0.3 + 0.5) / 10)
    assert not charged


SEVERAL = {"num_iterations": 3}
TEACHER = {"teacher": "start"}
GSPO = {"algorithm": "gspo"}
WARM_UP = {"algorithm": "ppo", "critic_warmup_steps": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        SEVERAL,
        {**SEVERAL, "off_policy_correction": "tis"},
        {"algorithm": "ppo"},
        {"algorithm": "ppo", **SEVERAL},
        WARM_UP,
        {**WARM_UP, **SEVERAL, "ratio": "sequence", "num_minibatches": 2},
        {**WARM_UP, **SEVERAL, "distillation": {**TEACHER, "mode": "full_logits"}},
        {"distillation": TEACHER, **SEVERAL},
        {"distillation": {**TEACHER, "mode": "full_logits"}, **SEVERAL},
        {"beta": 0.1, **SEVERAL},
        {"beta": 0.1, "kl_in": "reward"},
        {"algorithm": "ppo", "beta": 0.1, "kl_in": "reward", **SEVERAL},
        {"top_entropy_quantile": 0.5},
        {"off_policy_correction": "tis", "off_policy_level": "sequence"},
        {"off_policy_masks": {"seq_mean_k2": 1.0}},
        GSPO,
        {**GSPO, **SEVERAL},
        {**GSPO, **SEVERAL, "num_minibatches": 2},
        {**GSPO, **SEVERAL, "num_minibatches": 2, "off_policy_correction": "tis"},
    ],
    ids=str,
)
def test_a_learner_is_charged_with_the_passes_it_makes_as_a_simulated_one_is(changes):
    """As hooks count them, of groups that are equally long; rewards of every other one are equal.
    The last token of a response is charged, and not computed."""
    base, learner, passes = made_up_batch(groups=1), tiny_learner(**changes), Counter()
    batch = [
        replace(
            sample,
            group=group,
            prompt_ids=[3 + group, *sample.prompt_ids],
            completion_ids=[3 + member, *sample.completion_ids[1:]],  # so that none begin alike
            reward=1.0 if group % 2 else float(member),
        )
        for group in range(4)
        for member, sample in enumerate(base)
    ]
    if learner._reference is not None:
        learner._reference.model.load_state_dict(tiny_policy(seed=5).state_dict())

    def count(module, inputs, given):
        name = "train_token" if torch.is_grad_enabled() else "measure_token"
        passes[name] += given["input_ids"].numel()

    critic = None if learner._critic is None else learner._critic._scorer
    for scorer in filter(None, (learner._policy, learner._reference, critic)):
        body_of(scorer.model).register_forward_pre_hook(count, with_kwargs=True)
    learner.train(batch, 0)
    each = 1 + len(base[0].prompt_ids) + sum(len(sample.completion_ids) for sample in base)
    computed = each - len(base)
    assert learner.charged == {name: n / computed * each for name, n in passes.items()}
    charged = sum(getattr(COST, name) * count for name, count in learner.charged.items())
    is_warmup = learner._config.critic_warmup_steps > 0
    cost = emulation.learner_cost(COST, learner._config, is_warmup=is_warmup)
    simulated = 2 * each * (cost.train_token + cost.measure_token)
    assert charged == pytest.approx(simulated)


def test_without_a_model_nothing_waits(machine):
    pace = Pace(clock=machine.clock, sleep=machine.sleep)
    pace.begin()
    assert pace.charge(**SECOND) is None
    pace.end(is_idle=True)
    assert (machine.slept, pace.now(), pace.behind) == ([], 100.0, 0.0)


# -- the profile in tokens of the policy -----------------------------------------------------------


def test_an_iteration_of_the_policy_is_as_many_of_the_model_as_a_token_stands_for():
    config = emulated(tokens_per_token="50")
    profile, real = emulation.profile_of(config), profiles.load("qwen3-30b-a3b-h20")
    for rows, cached in ((1, 0), (16, 4_000), (300, 2_000)):
        # The cache has 50 tokens of the model for each of the policy's, the rows are the same.
        each = Fraction(real.cost(1).iteration(rows, 50 * cached))
        found = profile.cost(1).iteration(rows, cached)
        assert found == pytest.approx(float(50 * each), rel=1e-12)
    assert profile.cost(8).train_token == pytest.approx(50 * real.train_token / 8)
    assert profile.prefill_token == pytest.approx(50 * real.prefill_token)
    assert (profile.push, profile.pull) == (real.push, real.pull)
    assert profile.kv_capacity == real.kv_capacity // 50


def test_every_time_of_a_profile_is_one_of_those_two_kinds():
    config = emulated(tokens_per_token="50")
    real, scaled = profiles.load("qwen3-30b-a3b-h20"), emulation.profile_of(config)
    changed = {
        field.name
        for field in dataclasses.fields(real)
        if getattr(real, field.name) != getattr(scaled, field.name)
    }
    per_token = {"k1", "k2", "k3", "c", "k4", "prefill_token", "train_token", "measure_token"}
    assert changed == per_token | {"kv_capacity"}


# -- the devices -----------------------------------------------------------------------------------


def test_devices_that_do_not_train_are_instances():
    config = emulation.resolved(emulated())
    assert (config.rollout.num_instances, config.emulation.train_devices) == (5, 11)
    assert config.rollout.max_kv_tokens == 2577
    assert emulation.resolved(config) == config
    assert emulation.pace_of(config).cost.train_token == pytest.approx(100 * 0.0006791 / 11)


def test_in_turn_all_devices_generate_and_train():
    config = emulation.resolved(
        emulated().model_copy(
            update={"schedule": read_config("demo", {"schedule": "synchronous"}).schedule}
        )
    )
    assert (config.rollout.num_instances, config.emulation.train_devices) == (16, 16)
    assert config.is_colocated


def test_what_is_not_emulated_is_left_alone():
    config = read_config("demo")
    assert emulation.resolved(config) is config
    assert emulation.pace_of(config).cost is None
    assert (config.emulation.scale, config.emulation.said) == (1.0, "")


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"emulation.devices": "16"}, "emulation.devices: has no effect without emulation.profile"),
        ({"emulation.profile": "qwen2.5-7b-h20"}, "emulation.devices: needed"),
        ({"rollout.engine": "vllm"}, "only the native engine on one machine"),
        ({"runtime": "ray"}, "only the native engine on one machine"),
        ({"learner.num_ranks": "2"}, "one process trains for all"),
        ({"schedule.cost_model": "qwen2.5-7b-h20"}, "leave the others out"),
        ({"simulation.profile": "qwen2.5-7b-h20"}, "leave the others out"),
        (
            {"schedule.name": "synchronous", "schedule.accumulate_early": "true"},
            "the devices train after they have generated",
        ),
    ],
)
def test_a_configuration_that_would_not_be_emulated_is_refused(fields, said):
    used = {"emulation.profile": "qwen2.5-7b-h20", "emulation.devices": "16"}
    given = fields if set(fields) < set(used) else used | fields
    assert said in refusal(read_config, "demo", given)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"devices": "16", "train_devices": "16"},
            "that leaves 0 that generate, in instances of 1",
        ),
        (
            {"devices": "2", "profile": "qwen2.5-32b-h800"},
            "emulation.train_devices = 0: that leaves 2 that generate",
        ),
        ({"time_scale": "2000"}, "emulation.profile: an iteration: 1.24 s"),
        ({"reward_seconds": "1"}, "emulation.reward_seconds: 1 s at emulation.time_scale = 80"),
        ({"environment_seconds": "1"}, "a scale of 50 is slow enough"),
        ({"tokens_per_token": "1000"}, "a smaller emulation.tokens_per_token fits more"),
        ({"profile": "qwen3-30b"}, "there is no such profile"),
    ],
)
def test_what_cannot_be_emulated_is_refused(fields, said):
    assert said in refusal(emulation.resolved, emulated(**fields))


def test_another_number_of_instances_than_that_of_the_devices_is_refused():
    config = emulated().changed(rollout={"num_instances": 4})
    assert "are 5 instances and 11 devices that train" in refusal(emulation.resolved, config)


# -- what an engine is charged with ----------------------------------------------------------------


def paced(machine, **more):
    engine = make_engine(tiny_model(), **more)
    engine.pace = Pace(COST, 10.0, draft_seconds=0.001, clock=machine.clock, sleep=machine.sleep)
    return engine


def test_an_engine_takes_the_time_of_its_rows_and_its_cache(machine):
    engine, lengths, tokens = paced(machine), [9, 14], 6
    for request in make_requests(lengths, sampling(max_new_tokens=tokens)):
        engine.submit(request)
    taken = []
    while engine.has_work:
        before = machine.now
        engine.step()
        taken.append((machine.now - before) * 10)
    # The prompts first, with which the first tokens come; then one row for each, in a cache that
    # has the prompts and all tokens but the newest.
    expected = [COST.iteration(0, 0) + COST.prefill_token * sum(lengths)]
    expected += [COST.iteration(2, sum(lengths) + 2 * made) for made in range(tokens - 1)]
    assert taken == pytest.approx(expected)
    assert engine.load().behind_seconds == 0.0


def test_drafts_take_the_time_of_their_rows_and_of_looking_for_them(machine):
    how = sampling(max_new_tokens=6)
    (same,) = make_requests([9], how)
    run(make_engine(tiny_model()), [same])
    heard = []

    class Searching(FakeDrafter):
        num_searched = 1

        def observe(self, *arguments, seconds, **figures):
            heard.append(seconds)
            super().observe(*arguments, seconds=seconds, **figures)

    answers = {(tuple(same.prompt_ids), same.noise_key.sample): same.tokens}
    three = Searching(lambda answer, at, room, _: line(answer[at : at + min(room, 3)]), answers)
    engine, (request,) = paced(machine, drafter=three), make_requests([9], how)
    engine.submit(request)
    engine.step()
    before = machine.now
    engine.step()
    assert request.drafted == 3
    assert request.tokens == same.tokens[:5]
    seconds = COST.iteration(1 + 3, 9)
    assert (machine.now - before) * 10 == pytest.approx(seconds + 0.001)
    assert heard[-1] == pytest.approx(seconds)
