"""Whole simulations: against sums done by hand, twice the same, and what is said of mistakes."""

from __future__ import annotations

import dataclasses
import json
import re
from contextlib import closing
from math import ceil
from pathlib import Path
from statistics import fmean

import pytest

from rhymeflow import memory, profiles
from rhymeflow.cli import main
from rhymeflow.config import Config, LoraConfig
from rhymeflow.config.load import build_config, read_config
from rhymeflow.core.events import EpisodeEnded, Observed, TurnEnded
from rhymeflow.core.strategies.schedules import SCHEDULES
from rhymeflow.core.types import TrajectoryId
from rhymeflow.emulation import DRAFT_SECONDS
from rhymeflow.errors import UserError
from rhymeflow.profiles import Profile
from rhymeflow.sim.audit import Outcome
from rhymeflow.sim.drafts import RATES, expected_rate, rate_of
from rhymeflow.sim.response import Observation, Response
from rhymeflow.sim.result import SimulationResult, quantiles
from rhymeflow.sim.simulate import run, simulate
from rhymeflow.sim.workload import RecordedWorkload, ResponseSpec, SimulatedPrompt, workload
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.observe.runs import made, stored
from tests.store.stores import finished, group, segment

PROFILE = Profile(
    name="round numbers", description="d", source="s", k1=1e-6, k2=1e-3, k3=1e-3, c=0.0, k4=1e-3,
    prefill_token=1e-4, train_token=1e-3, measure_token=4e-4, train_step=0.5, push=0.25, pull=0.125,
    devices_per_instance=2, kv_capacity=1000,
)  # fmt: skip

STEPS, GROUPS, MEMBERS, PROMPT, LENGTH = 4, 2, 2, 10, 50
"""As many members as instances, so that no two share a prompt."""


class Constant:
    """All responses are of one length, or what is given otherwise."""

    def __init__(self, **other: object) -> None:
        vars(self).update(other)

    longest_prompt = PROMPT
    most_observed = 0
    computed_share = 1.0

    def prompt(self, number: int) -> SimulatedPrompt:
        return SimulatedPrompt(number, 0, PROMPT)

    def response(self, row: int, epoch: int, member: int) -> ResponseSpec:
        return ResponseSpec(LENGTH, float(member), [])


def a_config(path: Path, **changes: object) -> Config:
    """A small run on 2 instances of 2 devices and a learner of 4; nothing around them takes time.

    `simulation__pull` stands for `simulation.pull`.
    """
    profiles.save(PROFILE, path / "profile.json")
    fields: dict[str, object] = {
        "rollout.num_generations": MEMBERS,
        "rollout.max_completion_length": 100,
        "rollout.max_num_seqs": 8,
        "learner.max_steps": STEPS,
        "learner.groups_per_batch": GROUPS,
        "drafting.window": "off",
        "schedule.name": "synchronous",
        "schedule.cost_model": str(path / "profile.json"),
        "rollout.num_instances": 2,
        "learner.num_ranks": 4,
        "simulation.tick_seconds": 1e-9,
        "simulation.message_seconds": 0.0,
        "simulation.reward_seconds": 0.0,
    }
    fields.update({name.replace("__", "."): value for name, value in changes.items()})
    return build_config(fields, where="test")


def ran(path: Path, **changes: object) -> SimulationResult:
    """With lengths that are drawn."""
    config = a_config(path, **changes)
    return run(config, workload(config, None))


def rollout_seconds() -> float:
    """Both instances get half of the responses; they run in step."""
    n = GROUPS * MEMBERS // 2
    seconds = PROFILE.k2 + PROFILE.k4 + PROFILE.prefill_token * n * PROMPT
    for generated in range(1, LENGTH):
        kv_tokens = n * (PROMPT + generated - 1)
        seconds += PROFILE.k1 * kv_tokens + PROFILE.k3 * n + PROFILE.k4
    return seconds


def train_seconds() -> float:
    tokens = GROUPS * (PROMPT + MEMBERS * LENGTH)  # a group's prompt is computed once
    return PROFILE.train_step + PROFILE.train_token / 4 * tokens


def test_groups_that_are_trained_on_early_cost_no_time(tmp_path: Path) -> None:
    """Half of a batch is trained on while the other half is generated, of five times the tokens."""
    short = LENGTH // 5
    uneven = Constant(
        response=lambda row, epoch, member: ResponseSpec(LENGTH if row % 2 else short, member, [])
    )
    off = run(a_config(tmp_path), uneven)
    on = run(a_config(tmp_path, schedule__accumulate_early=True), uneven)
    early = (PROMPT + MEMBERS * short) * PROFILE.train_token / 4
    assert on.seconds == pytest.approx(off.seconds - STEPS * early)


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        # The critic's training and its values; groups with equal rewards are trained on, too.
        ({"learner__algorithm": "ppo"}, PROFILE.train_token + PROFILE.measure_token),
        ({"learner__distillation__teacher": "start"}, PROFILE.measure_token),
        ({"learner__beta": 0.1}, PROFILE.measure_token),
    ],
)
def test_a_critic_a_teacher_and_a_reference_take_their_time(
    tmp_path: Path, changes: dict, passes: float
) -> None:
    flat = Constant(response=lambda row, epoch, member: ResponseSpec(LENGTH, float(row % 2), []))
    extra = passes / 4 * GROUPS * (PROMPT + MEMBERS * LENGTH)
    for lengths in (Constant(), flat):
        found = run(a_config(tmp_path, **changes), lengths).seconds
        plain = run(a_config(tmp_path), Constant()).seconds
        assert found == pytest.approx(plain + STEPS * extra)


def test_steps_that_train_a_critic_alone_only_score_the_policy(tmp_path: Path) -> None:
    plain, warmed = (
        run(a_config(tmp_path, learner__algorithm="ppo", **changes), Constant()).seconds
        for changes in ({}, {"learner__critic_warmup_steps": 2})
    )
    saved = (PROFILE.train_token - PROFILE.measure_token) / 4
    assert plain - warmed == pytest.approx(2 * saved * GROUPS * (PROMPT + MEMBERS * LENGTH))


@pytest.mark.parametrize(
    ("workload", "saved"),
    [
        # A quarter of a batch's tokens is left where what is computed once is trained on once.
        ({"computed_share": 0.25}, 0.75 * PROFILE.train_token * GROUPS),
        # Groups with no signal are only measured.
        (
            {"response": lambda row, epoch, member: ResponseSpec(LENGTH, member * (row % 2), [])},
            PROFILE.train_token - PROFILE.measure_token,
        ),
    ],
)
def test_what_need_not_be_trained_on_takes_less(
    tmp_path: Path, workload: dict, saved: float
) -> None:
    found, all_of_it = (run(a_config(tmp_path), Constant(**each)) for each in (workload, {}))
    tokens = PROMPT + MEMBERS * LENGTH  # of a group
    assert found.seconds == pytest.approx(all_of_it.seconds - STEPS * saved / 4 * tokens)


def test_drafts_make_as_many_tokens_as_their_chances_say(tmp_path: Path) -> None:
    """Where rows cost nothing all there may be are drafted; the first token comes of the prompt."""
    profiles.save(dataclasses.replace(PROFILE, k2=0.1), tmp_path / "free.json")
    config = a_config(
        tmp_path, drafting__window="cost", drafting__max_draft=2,
        schedule__cost_model=str(tmp_path / "free.json"),
    )  # fmt: skip
    new, known = RATES[1:3]
    repeated = Constant(
        prompt=lambda number: SimulatedPrompt(number % 2, number // 2, PROMPT),
        response=lambda row, epoch, member: ResponseSpec(
            LENGTH, float(member), [], [known if epoch else new]
        ),
    )
    found = run(config, repeated)
    first, then = (1 + rate + rate * rate for rate in (new, known))
    in_first, later = ceil((LENGTH - 1) / first), ceil((LENGTH - 1) / then)
    responses, turns = GROUPS * MEMBERS, in_first + (STEPS - 1) * later
    kept = (1 - each / (2 * (LENGTH - 1)) for each in (first, then))  # of drafts, before the end
    drafted = next(kept) * in_first + next(kept) * (STEPS - 1) * later
    assert found.drafted == round(2 * responses * drafted)
    accepted = STEPS * (LENGTH - 1) - turns
    assert found.accepted == round(responses * accepted)
    assert found.tokens_per_iteration == pytest.approx(1 + accepted / turns)
    assert found.tokens_generated == STEPS * responses * LENGTH
    n = responses // 2
    seconds = 0.1 + PROFILE.k4 + PROFILE.prefill_token * n * PROMPT
    for i in range(later):
        seconds += PROFILE.k1 * n * (PROMPT + then * i) + 0.1 + PROFILE.k4 + n * DRAFT_SECONDS
    step = seconds + train_seconds() + PROFILE.push + PROFILE.pull
    assert found.step_seconds[1:] == pytest.approx([step] * (STEPS - 1), rel=1e-6)
    assert "accepted" in found.text()
    found = run(a_config(tmp_path), repeated)
    assert (found.tokens_per_iteration, found.drafted, found.accepted) == (1, 0, 0)
    assert "accepted" not in found.text()


def test_synchronous_steps_are_the_sum_of_their_parts(tmp_path: Path) -> None:
    found = run(a_config(tmp_path), Constant())
    step = rollout_seconds() + train_seconds() + PROFILE.push + PROFILE.pull
    assert found.step_seconds[1:] == pytest.approx([step] * (STEPS - 1), rel=1e-6)
    assert found.step_seconds[0] == pytest.approx(step - PROFILE.pull, rel=1e-6)
    assert found.steps_per_second == pytest.approx(1 / step, rel=1e-6)
    responses = GROUPS * MEMBERS
    assert found.throughput == pytest.approx(responses * (PROMPT + LENGTH) / step, rel=1e-6)
    assert found.response_throughput == pytest.approx(responses * LENGTH / step, rel=1e-6)
    assert found.trajectories_per_second == pytest.approx(responses / step, rel=1e-6)
    assert found.idle_rollout == pytest.approx((train_seconds() + PROFILE.push) / step, rel=1e-6)
    assert found.idle_learner == pytest.approx((step - train_seconds() - PROFILE.push) / step)
    whole = STEPS * rollout_seconds() + (STEPS - 1) * PROFILE.pull
    assert found.idle_instances == pytest.approx([1 - whole / found.seconds] * 2)
    assert found.staleness == {0: STEPS * responses}
    assert (found.tokens_generated, found.tokens_wasted) == (STEPS * responses * LENGTH, 0)
    assert (found.pulls, found.preemptions, found.interrupts) == (2 * (STEPS - 1), 0, 0)


def test_an_adapter_takes_its_own_bytes_and_no_gradient_of_what_is_under_it(tmp_path) -> None:
    own = {"model__name": "recipe:demo", "model__lora__rank": 8}
    found = run(config := a_config(tmp_path, **own), Constant())
    model = memory.model_on_gpus(config)
    share = model.num_adapter / model.num_parameters
    tokens = train_seconds() - PROFILE.train_step
    training = PROFILE.train_step * share + tokens * (4 / 6 + share)
    moved = (PROFILE.push + PROFILE.pull) * (share + 1 / 16)  # a part of the model is hashed
    step = rollout_seconds() + training + moved
    assert found.step_seconds[1:] == pytest.approx([step] * (STEPS - 1), rel=1e-6)
    profiles.save(dataclasses.replace(PROFILE, of_adapter=True), tmp_path / "profile.json")
    step = rollout_seconds() + train_seconds() + PROFILE.push + PROFILE.pull
    assert run(config, Constant()).step_seconds[1] == pytest.approx(step, rel=1e-6)
    with pytest.raises(UserError, match="is of training an adapter, and without"):
        run(config.changed(model={"lora": LoraConfig()}), Constant())


def test_one_step_overlaps_the_two(tmp_path: Path) -> None:
    config = a_config(tmp_path, schedule__name="one_step", learner__max_steps=8)
    found = run(config, Constant())
    learner = train_seconds() + PROFILE.push
    assert learner > rollout_seconds() + PROFILE.pull, "the learner sets the pace"
    assert found.step_seconds[2:] == pytest.approx([learner] * 6, rel=1e-6)
    assert found.idle_learner == pytest.approx(0.0, abs=1e-6)
    assert found.staleness == {0: 4, 1: 7 * 4}


def test_twice_the_same_to_the_byte(tmp_path: Path) -> None:
    config = a_config(tmp_path, schedule__name="staleflow", schedule__max_staleness=2)
    told: list[int] = []
    for name in "ab":
        found = simulate(config, output=tmp_path / name, on_step=told.append)
    assert told == 2 * list(range(1, STEPS + 1))
    assert json.loads((tmp_path / "a/result.json").read_text()) == json.loads(found.json())
    for file in ("result.json", "timeline.png"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    other = build_config({"run.seed": 1}, base=config, where="test")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written to"):
        simulate(config, output=tmp_path / "file")
    assert simulate(other, output=tmp_path / "c").json() != (tmp_path / "a/result.json").read_text()


def test_redundancy_and_filtering_show_in_the_endings(tmp_path: Path) -> None:
    found = ran(
        tmp_path, schedule__name="partial", schedule__extra_generations=1,
        schedule__filter_zero_variance=True, learner__max_steps=8,
    )  # fmt: skip
    endings = {label for quantile in found.quantiles for label in quantile.endings}
    assert {"consumed", "filtered", "aborted: its group did not need it"} <= endings
    assert found.tokens_wasted > 0
    for word in ("filtered", "did not", "Staleness of trained responses", "idle", "partial"):
        assert word in found.text()


@pytest.mark.parametrize(("prompts", "steps"), [(1000, STEPS), (8, 30)])
def test_how_well_lengths_were_predicted(tmp_path: Path, prompts: int, steps: int) -> None:
    changes = {"simulation__workload__num_prompts": prompts, "learner__max_steps": steps}
    found = ran(tmp_path, **changes)
    shown = "-"  # no prompt came twice
    if prompts == 8:
        assert found.rank_correlation > 0.5
        shown = f"{found.rank_correlation:.2f}"
    assert f"predicted with rank correlation {shown}" in found.text()


def test_quantiles_hold_every_response_once() -> None:
    outcomes = [Outcome(length, "consumed", "") for length in range(1, 13)] + [
        Outcome(99, "aborted", "x")
    ]
    found = quantiles(outcomes)
    assert [q.responses for q in found] == [3, 2, 3, 2, 3]
    assert (found[-1].shortest, found[-1].longest) == (11, 99)
    assert found[-1].endings == {"aborted: x": 1, "consumed": 2}
    assert [q.responses for q in quantiles(outcomes[:2])] == [1, 1]


TURNS = {"simulation.workload.mean_turns": 3, "simulation.workload.observation_tokens": 7}
BOUNDS = {"synchronous": None, "one_step": None, "histopipe": None}


def test_a_turn_takes_in_what_was_answered_and_keeps_the_rest(tmp_path: Path) -> None:
    config = a_config(tmp_path, learner__groups_per_batch=1)
    # The environment answers once, after 20 tokens: 5 tokens, which take 3 seconds.
    observations = [Observation(20, 5, 3.0)]
    found = run(
        config,
        Constant(most_observed=5, response=lambda *of: ResponseSpec(LENGTH, of[2], observations)),
    )

    def turn(before: int, tokens: int, kept: int = 0) -> float:
        seconds = PROFILE.k2 + PROFILE.k4 + PROFILE.k1 * kept
        seconds += PROFILE.prefill_token * (before - kept)
        for generated in range(1, tokens):
            kv_tokens = before + generated - 1
            seconds += PROFILE.k1 * kv_tokens + PROFILE.k3 + PROFILE.k4
        return seconds

    rollout = turn(PROMPT, 20) + 3.0 + turn(PROMPT + 20 + 5, LENGTH - 20, kept=PROMPT + 20 - 1)
    tokens = PROMPT + 2 * (LENGTH + 5)  # each of the two instances has one
    train = PROFILE.train_step + PROFILE.train_token / 4 * tokens + PROFILE.push
    assert found.step_seconds[0] == pytest.approx(rollout + train, abs=1e-6)
    assert found.steps == STEPS
    assert found.mean_length == LENGTH + 5
    assert found.tokens_generated == STEPS * 2 * LENGTH
    assert found.tokens_wasted == 0


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule_keeps_the_laws_with_turns_and_deaths(name: str, tmp_path: Path) -> None:
    """The audit of the simulated world raises where one does not."""
    found = ran(
        tmp_path, **TURNS, schedule__name=name, schedule__max_staleness=BOUNDS.get(name, 2),
        schedule__extra_generations=1, learner__groups_per_batch=4,
        simulation__faults__device_mtbf_hours=0.02, simulation__faults__instance_seconds=2.0,
        simulation__faults__learner_seconds=2.0,
    )  # fmt: skip
    assert found.steps == STEPS
    assert found.deaths, "nothing died"


def test_lengths_as_a_run_recorded_them(tmp_path: Path) -> None:
    run_dir = made(tmp_path / "run")
    config = a_config(tmp_path, rollout__max_completion_length=500)
    recorded = RecordedWorkload(run_dir, config)
    assert [recorded.prompt(i).row for i in (0, 1, 9, 10)] == [0, 1, 9, 0]
    assert recorded.prompt(10).epoch == recorded.prompt(0).epoch + 1
    assert recorded.response(3, 0, 0).length == 13
    assert recorded.response(3, 0, 1).length == 103
    assert recorded.response(3, 7, 5).length in (13, 103), "another response to the same prompt"
    assert recorded.response(77, 0, 0).length in {*range(10, 20), *range(100, 110)}
    shorter = RecordedWorkload(run_dir, a_config(tmp_path))
    assert shorter.response(3, 0, 1).length == 100, "no longer than allowed"
    assert recorded.computed_share == 1.0, "its metrics do not say"
    with (run_dir / "metrics.jsonl").open("a") as file:
        for step, share in ((1, 0.25), (3, 0.75)):
            file.write(json.dumps({"step": step, "packing/computed_share": share}) + "\n")
    assert RecordedWorkload(run_dir, config).computed_share == 0.5
    config = build_config({"rollout.num_generations": 2}, base=config, where="test")
    found = simulate(config, output=tmp_path / "out", workload=run_dir)
    assert found.quantiles[0].shortest == 10


def test_a_recorded_response_accepts_drafts_as_its_own_iterations_did(tmp_path: Path) -> None:
    """Member 1 of group 3: 5 and 98 tokens under one version, in 3 and 49 iterations with as many
    drafted as made. Member 0 had to prefill the prompt, from which member 1 drafts at once; with it
    the weights change after 5, and what follows is prefilled."""
    run_dir = made(tmp_path / "run")
    config = a_config(tmp_path, rollout__max_completion_length=500)
    recorded = RecordedWorkload(run_dir, config)
    assert recorded.response(3, 0, 1).acceptance == [rate_of([103], 3 + 49, 103)]
    first = recorded.response(4, 0, 0)
    assert first.acceptance == [rate_of([4, 8], 3 - 1 + 5 - 1, 14)]
    kept = build_config({"rollout.kv_cache_on_pull": "keep"}, base=config, where="test")
    first = RecordedWorkload(run_dir, kept).response(4, 0, 0)
    assert first.acceptance == [rate_of([13], 3 - 1 + 5, 14)]
    with closing(TrajectoryReader(run_dir / "events.db")) as reader:
        lengths = [length for (length,) in reader.query(
            "SELECT length FROM trajectories JOIN groups USING (group_id) WHERE suite IS NULL"
            " AND reward IS NOT NULL AND length > 0"
        )]  # fmt: skip
    undrafted = recorded.response(0, 0, 1)
    assert undrafted.acceptance == [expected_rate(0.7, 100 / fmean(lengths), is_known=False)]


def test_each_turn_of_a_recorded_response_has_an_acceptance_of_its_own(tmp_path: Path) -> None:
    """After its prompt and each answer there is a prefill, which makes a token without a draft, but
    for a turn that one iteration with a draft made. The first turn is empty, as an agent's."""
    run_dir, which = made(tmp_path / "run"), TrajectoryId(100, 0)
    segments = [(3, 6, 2, 9), (13, 5, 5, 8), (21, 4, 4, 0), (28, 3, 1, 5)]
    answers = [(0, 3), (9, 13), (18, 21), (25, 28)]
    with stored(run_dir) as store:
        group(store, which.group)
        for start, count, steps, drafted in segments:
            segment(store, which, count, start=start, steps=steps, drafted=drafted)
        finished(store, which, 31, 1.0)
        for turn, (before, after) in enumerate(answers, start=1):
            store.record(90.0, [TurnEnded(which, "rollout-0", turn, before)])
            store.record(91.0, [Observed(which, turn, after, seconds=1.0)])
        store.commit()
    config = a_config(tmp_path, rollout__max_completion_length=500)
    found = RecordedWorkload(run_dir, config).response(100, 0, 0)
    assert [each.after for each in found.observations] == [0, 6, 11, 15]
    rates = [RATES[0], rate_of([5], 1, 9), rate_of([4], 4, 8), RATES[0], rate_of([3], 1, 5)]
    assert min(rates[1], rates[4]) > 0.8 > 0.3 > rates[2]
    assert found.acceptance == rates
    response = Response(which, 5, 24, draft_classes=(8, 1))
    for response.turn, draft_class in enumerate((8, 1, 1)):
        assert response.draft_class == draft_class


def test_a_simulated_run_can_be_the_workload_of_another(tmp_path: Path) -> None:
    """Its responses have as many turns as before, and short ones, of one iteration with a draft."""
    config = a_config(
        tmp_path, drafting__window="cost", learner__max_steps=6,
        rollout__max_completion_length=60, **TURNS,
    )  # fmt: skip
    first = simulate(config, output=tmp_path / "first")
    again = simulate(config, output=tmp_path / "again", workload=tmp_path / "first")
    assert again.mean_length == pytest.approx(first.mean_length, rel=0.05)
    assert again.steps_per_second == pytest.approx(first.steps_per_second, rel=0.15)


def test_answers_as_a_run_recorded_them(tmp_path: Path) -> None:
    """They take as long as it took from the end of the turn, whatever the environment says of its
    own time: they may have waited for a free process."""
    run_dir = made(tmp_path / "run")
    long, other = TrajectoryId(3, 1), TrajectoryId(3, 0)  # of 103 and 13 tokens
    happened = [
        (90.0, [TurnEnded(long, "rollout-0", 1, 40), TurnEnded(other, "rollout-1", 1, 6)]),
        (90.25, [Observed(other, 1, 7, seconds=0.125)]),
        (92.5, [Observed(long, 1, 47, seconds=2.0)]),
        (94.0, [TurnEnded(long, "rollout-0", 2, 60)]),
        (94.5, [Observed(long, 2, 70, seconds=0.5)]),
        (97.0, [TurnEnded(long, "rollout-0", 3, 103)]),
        (98.75, [EpisodeEnded(long, 3, "stop", seconds=1.0)]),
    ]
    with stored(run_dir) as store:
        for at, together in happened:
            store.record(at, together)
    config = a_config(tmp_path, **{"rollout.max_completion_length": 500})
    recorded = RecordedWorkload(run_dir, config)
    assert recorded.response(3, 0, 1).length == 86
    both = [Observation(40, 7, 2.5), Observation(53, 10, 0.5)]
    assert recorded.response(3, 0, 1).observations == both
    assert recorded.response(3, 0, 0).observations == [Observation(6, 1, 0.25)]
    assert (recorded.response(3, 0, 1).ending, recorded.response(3, 0, 0).ending) == (1.75, 0.0)
    shorter = RecordedWorkload(run_dir, a_config(tmp_path, **{"rollout.max_completion_length": 53}))
    assert shorter.response(3, 0, 1).observations == both[:1], "cut before the second"
    assert recorded.response(4, 0, 1).observations == []
    assert recorded.most_observed == 17
    config = build_config({"rollout.num_generations": 2}, base=config, where="test")
    found = simulate(config, output=tmp_path / "out", workload=run_dir)
    assert found.steps == STEPS


def test_a_step_waits_for_the_answer_that_ends_the_last_episode(tmp_path: Path) -> None:
    late = Constant(
        response=lambda row, epoch, member: ResponseSpec(
            LENGTH, float(member), [], ending=30.0 if member else 0.0
        )
    )
    config = a_config(tmp_path)
    plain, found = run(config, Constant()), run(config, late)
    longer = (late - at for at, late in zip(plain.step_seconds, found.step_seconds, strict=True))
    assert list(longer) == pytest.approx([30.0] * STEPS)


def test_a_run_without_responses(tmp_path: Path) -> None:
    SqliteTrajectoryStore(tmp_path / "events.db").close()
    with pytest.raises(UserError, match="no response was finished"):
        workload(a_config(tmp_path), tmp_path)
    with pytest.raises(UserError, match="no such file"):
        workload(a_config(tmp_path), tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"simulation__skip_steps": 4}, r"simulation\.skip_steps: 4 leaves nothing"),
        ({"rollout__max_completion_length": 991}, r"rollout\.max_completion_length: 991 and a"),
        ({"rollout__max_kv_tokens": 109}, "KV cache of an instance, 109 tokens"),
        ({"simulation__profile": "h20"}, "no such profile"),
    ],
)
def test_what_cannot_be_simulated(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(a_config(tmp_path, **changes), Constant())


def test_colocated_devices_all_produce_and_all_train(tmp_path: Path) -> None:
    changes = {"simulation__colocated": True, "rollout__num_instances": 4}
    found = run(a_config(tmp_path, **changes), Constant())
    assert found.devices == "4 instances of d; trained on 8 devices"
    assert found.idle_rollout + found.idle_learner >= 1 - 1e-9, "never both at the same time"
    with pytest.raises(UserError, match="colocated"):
        a_config(tmp_path, schedule__name="one_step", **changes)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "cluster", "--output", str(tmp_path), "--learner.max_steps", "3"]
    assert main([*arguments, "--learner.groups_per_batch", "8"]) == 0
    out = capsys.readouterr().out
    assert "trained" in out
    assert out.endswith(f"timeline: {tmp_path}/timeline.png\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "events.db", "metrics.jsonl", "result.json", "timeline.png", "writer.lock",
    ]  # fmt: skip


def test_the_examples_in_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs/simulator.md"
    example, drafts = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(example, {})
    throughput, idle, *staleness = capsys.readouterr().out.split()
    assert float(throughput) > 1000
    assert 0 <= float(idle) <= 1
    assert staleness[0] == "{0:"
    exec(drafts, {})
    rows = [[float(word) for word in line.split()] for line in capsys.readouterr().out.splitlines()]
    for n, drafted, generated, seconds, over in rows:
        row = f"| {n:g} | {drafted:g} | {generated:.2f} | {seconds * 1e3:.1f} ms"
        (line,) = [line for line in page.read_text().splitlines() if line.startswith(row)]
        assert line.endswith(f"| {over:.1f}x |")


LARGE = {
    "model.name": "Qwen/Qwen3-8B",
    "rollout.num_instances": 2,
    "rollout.num_generations": 2,
    "rollout.max_completion_length": 100,
    "learner.num_ranks": 8,
    "learner.groups_per_batch": 2,
    "learner.max_steps": 3,
}


def test_model_devices_and_ranks_are_those_of_the_configuration() -> None:
    config = build_config(LARGE, where="test")
    found = run(config, workload(config, None))
    assert found.devices == (
        "2 instances of Qwen3-8B, bfloat16, TP1, NVIDIA H800 80 GB; trained on 8 devices"
    )
    named = build_config({**LARGE, "schedule.cost_model": "qwen3-8b-h800"}, where="test")
    assert found == run(named, workload(named, None)), "routing weighs with it too"
    other = build_config({**LARGE, "model.name": "someone/else-8B"}, where="test")
    with pytest.raises(UserError, match=r"no profile for someone/else-8B on GPUs of 80 GB, 1 to"):
        run(other, workload(other, None))
    other = build_config({"simulation.profile": "demo-cpu"}, base=other, where="test")
    assert "recipe:demo" in run(other, workload(other, None)).devices


@pytest.mark.parametrize(
    ("constant", "bound"), [("epoch_correlation", 1), ("prompt_variance_share", 3)]
)
def test_rhymeflow_falls_back(constant: str, bound: int) -> None:
    """Where history predicts nothing it loses nothing to staleflow, which does not ask it."""
    given = {
        "schedule.max_staleness": str(bound), f"simulation.workload.{constant}": "0",
        "rollout.num_instances": "4", "learner.num_ranks": "20",
        "simulation.workload.num_prompts": "64", "simulation.workload.prompt_tokens": "256",
        "simulation.workload.mean_length": "2000", "rollout.max_completion_length": "8192",
        "learner.groups_per_batch": "32", "learner.max_steps": "14",
    }  # fmt: skip
    found = {}
    for name in ("rhymeflow", "staleflow"):
        config = read_config("cluster", given | {"schedule.name": name})
        found[name] = run(config, workload(config, None), uncounted=bound).throughput
    assert found["rhymeflow"] >= 0.97 * found["staleflow"]
