"""What is foretold of lengths: bounds, calibration, worthless histories, and who finishes first."""

from __future__ import annotations

import random
from math import log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.core.history import LengthHistory
from rhymeflow.core.lengths.correction import Correction
from rhymeflow.core.lengths.hindsight import spearman
from rhymeflow.core.lengths.prompts import ByReward
from rhymeflow.core.types import TrajectoryId
from tests.core.lengths import LONGEST, Player, World, bimodal, lognormal, power_law

SHAPES = [lognormal, bimodal, power_law]


# -- any facts in any order ------------------------------------------------------------------------

groups = st.integers(0, 5)
facts = st.one_of(
    st.tuples(st.just("open"), groups, st.integers(0, 2), st.integers(0, 3)),
    st.tuples(st.just("finished"), groups, st.integers(0, 3), st.integers(1, 300)),
    st.tuples(st.just("rewarded"), groups, st.integers(0, 3), st.floats(-1, 1)),
    st.tuples(st.just("close"), groups),
)


def tell(history: LengthHistory, fact: tuple) -> None:
    kind, group, *rest = fact
    match kind:
        case "open":
            history.open(group, *rest)
        case "finished":
            history.finished(TrajectoryId(group, rest[0]), rest[1])
        case "rewarded":
            history.rewarded(TrajectoryId(group, rest[0]), rest[1])
        case "close":
            history.close(group)


def answers(history: LengthHistory) -> list:
    made = (0, 1, 7, 60, 199)
    return [
        *(history.expected(group, m) for group in range(7) for m in made),
        *(history.quantile(group, q, m) for group in range(7) for m in made for q in (0.1, 0.9)),
        history.skill,
        history.worth,
        history.calibration(),
        *(history.by_reward(prompt) for prompt in range(3)),
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(facts, max_size=120), st.integers(1, 300))
def test_expectations_are_in_their_bounds_and_grow_with_what_is_made(facts, longest):
    history = LengthHistory(longest)
    for fact in facts:
        tell(history, fact)
    for group in range(7):
        before = 0.0
        for made in range(0, longest, max(1, longest // 40)):
            found = history.expected(group, made)
            assert max(made, before) < found + 1e-9
            assert made < found <= longest
            quantiles = [history.quantile(group, q, made) for q in (0, 0.1, 0.5, 0.9, 1)]
            assert quantiles == sorted(quantiles)
            assert made < quantiles[0]
            assert quantiles[-1] <= longest
            before = found
        assert history.expected(group, longest) == longest
    assert 0 <= history.skill <= 1


@settings(max_examples=40, deadline=None)
@given(st.lists(facts, max_size=120), st.randoms(use_true_random=False))
def test_asking_changes_nothing_and_neither_does_a_fact_told_twice(facts, rng):
    quiet, asked = LengthHistory(200), LengthHistory(200)
    for fact in facts:
        tell(quiet, fact)
        tell(asked, fact)
        kind, group, *_ = fact
        tell(asked, fact)  # again
        if kind == "finished":  # and once more, with another length
            asked.finished(TrajectoryId(group, fact[2]), 1)
        if rng.random() < 0.3:
            asked.expected(rng.randrange(7), rng.randrange(200))
            asked.quantile(rng.randrange(7), rng.random())
    assert answers(asked) == answers(quiet)


def test_what_is_not_known_is_not_heard():
    history = LengthHistory(100)
    before = answers(history)
    history.finished(TrajectoryId(4, 0), 50)
    history.rewarded(TrajectoryId(4, 0), 1.0)
    history.close(4)
    assert answers(history) == before
    history.open(0, 0, 0)
    history.rewarded(TrajectoryId(0, 0), 1.0)  # not finished
    history.close(0)
    history.finished(TrajectoryId(0, 0), 50)  # too late
    assert answers(history) == before


def test_a_response_finishes_once():
    found = []
    for twice in (False, True):
        history = LengthHistory(1000)
        history.open(0, 0, 0)
        history.finished(TrajectoryId(0, 0), 40)
        if twice:
            history.finished(TrajectoryId(0, 0), 900)
            history.open(0, 5, 3)
        found.append(history.expected(0))
        history.close(0)
        found.append((history.of(0).latest, history.of(5)))
    assert found[:2] == found[2:]


def test_what_others_say_reaches_groups_that_were_asked_about_before():
    player = Player(LengthHistory(LONGEST))
    history = player.history
    history.open(10**6, 10**6, 0)
    before = history.expected(10**6, 10)
    player.play(World(prompts=64).epoch(), 0)
    assert history.expected(10**6, 10) != before
    history.open(10**6 + 1, 10**6 + 1, 0)
    assert history.expected(10**6, 10) == history.expected(10**6 + 1, 10)


def test_expectations_never_fall_whatever_experience_says(monkeypatch):
    """Of responses at one stage experience may say that they end soon."""
    factors = {True: 3.0, False: 1 / 3}
    monkeypatch.setattr(
        Correction, "factor", lambda self, finished, size, distance: factors[distance < 0.5]
    )
    player = Player(LengthHistory(LONGEST))
    player.play(World(prompts=64).epoch(), 0)
    found = [player.history.expected(10**6, made) for made in range(0, LONGEST, 50)]
    assert found == sorted(found)


def test_before_anything_is_seen_a_quarter_of_the_longest():
    assert LengthHistory(4096).expected(0) == pytest.approx(1024, rel=0.02)


def test_the_order_in_which_groups_of_a_batch_end_does_not_matter():
    found = []
    for order in (list(range(32)), list(reversed(range(32)))):
        history, rng = LengthHistory(1000), random.Random(3)
        for group in range(32):
            history.open(group, group, 0)
        lengths = {group: [rng.randint(1, 900) for _ in range(4)] for group in range(32)}
        for group in range(32):
            for member, length in enumerate(lengths[group]):
                history.finished(TrajectoryId(group, member), length)
        for group in order:
            history.close(group)
        history.open(99, 5, 1)
        found.append([history.expected(99, made) for made in (0, 100, 500)])
    assert found[0] == pytest.approx(found[1], rel=1e-9)


# -- what is remembered of a prompt ----------------------------------------------------------------


def test_a_prompt_s_record_and_lengths_by_reward():
    history = LengthHistory(1000)
    history.open(0, 7, 0)
    for member, (length, reward) in enumerate([(10, 0.0), (20, 1.0), (30, 1.0), (40, 0.0)]):
        history.finished(TrajectoryId(0, member), length)
        history.rewarded(TrajectoryId(0, member), reward)
    history.close(0)
    record = history.of(7)
    assert (record.responses, record.mean, record.latest) == (4, 25, [10, 20, 30, 40])
    assert [record.quantile(q) for q in (0, 0.5, 1)] == [10, 25, 40]
    assert history.by_reward(7) == ByReward(above=25.0, others=25.0)
    history.open(1, 7, 1)
    for member, (length, reward) in enumerate([(100, 1.0), (200, 0.0)]):
        history.finished(TrajectoryId(1, member), length)
        history.rewarded(TrajectoryId(1, member), reward)
    history.close(1)
    record = history.of(7)
    assert record.latest == [100, 200]
    assert record.mean == pytest.approx((0.5 * 100 + 300) / (0.5 * 4 + 2)), "an epoch halves"
    assert history.by_reward(7) == ByReward(
        above=pytest.approx((0.5 * 50 + 100) / 2), others=pytest.approx((0.5 * 50 + 200) / 2)
    )
    history.open(2, 9, 0)
    for member in range(2):
        history.finished(TrajectoryId(2, member), 10)
        history.rewarded(TrajectoryId(2, member), 1.0)
    history.close(2)
    assert history.by_reward(9) == ByReward(above=None, others=10), "none is above the mean"
    assert history.of(8) is None
    assert history.by_reward(8) == ByReward(None, None)


def test_a_late_group_of_an_earlier_epoch_does_not_take_the_latest_s_place():
    history = LengthHistory(1000)
    for group, epoch, length in ((0, 0, 10), (1, 1, 300), (2, 0, 20)):
        history.open(group, 7, epoch)
        history.finished(TrajectoryId(group, 0), length)
        history.close(group)
        assert history.of(7).responses == group + 1
    assert history.of(7).latest == [300]


def test_a_group_that_ended_early_is_remembered_as_longer_than_those_that_finished():
    """The others would have been longer: what it says of its prompt is above their mean."""
    expected = []
    for finished in (4, 8):
        player = Player(LengthHistory(LONGEST), batch=32)
        player.play(World(prompts=384).epoch(), 0)
        history = player.history
        history.open(10**6, 10**6, 0)
        for member in range(finished):
            history.finished(TrajectoryId(10**6, member), 500 + member)
        history.close(10**6)
        history.open(10**6 + 1, 10**6, 1)
        expected.append(history.expected(10**6 + 1))
    assert expected[0] > 1.1 * expected[1]


# -- calibration -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: shape.__name__)
def third_epoch(request):
    """What is foretold in the third epoch, and what was best possible (the prompt's true level)."""
    world, history = World(request.param), LengthHistory(LONGEST)
    player = Player(history)
    for epoch in (0, 1):
        player.play(world.epoch(), epoch)
    levels = list(world.levels)
    groups = list(world.epoch())
    told = player.play(groups, 2)
    truth = [levels[row] for row, lengths in groups for _ in lengths]
    return history, told, truth


def test_ranks_are_nearly_as_good_as_with_the_true_levels(third_epoch):
    history, told, truth = third_epoch
    lengths = [length for *_, length in told]
    best = spearman(truth, lengths)
    assert best > 0.7
    # Of two epochs of 8 responses: those know a level to within 0.96 of its correlation at best.
    assert spearman([expected for expected, *_ in told], lengths) > 0.92 * best
    assert history.calibration().rank_correlation > 0.85 * best  # of a few groups only


def test_the_80_percent_interval_has_80_percent(third_epoch):
    history, told, _ = third_epoch
    covered = sum(low <= length <= high for _, low, high, length in told) / len(told)
    assert covered == pytest.approx(0.8, abs=0.05)
    assert history.calibration().coverage == pytest.approx(0.8, abs=0.09)
    assert history.calibration().known == 1.0


def test_the_mean_is_right(third_epoch):
    """As far as factors on one distribution can be: bimodal lengths are spread unlike by level."""
    _, told, _ = third_epoch
    expected, true = sum(t[0] for t in told), sum(t[3] for t in told)
    assert expected / true == pytest.approx(1, abs=0.18)


def test_skill_is_the_share_of_variance_explained(third_epoch):
    history, told, _ = third_epoch
    logs = [log(length) for *_, length in told]
    members = len(logs) // 256
    within = 0.0
    for i in range(0, len(logs), members):
        mean = sum(logs[i : i + members]) / members
        within += sum((value - mean) ** 2 for value in logs[i : i + members])
    middle = sum(logs) / len(logs)
    share = 1 - within * members / (members - 1) / sum((value - middle) ** 2 for value in logs)
    assert history.skill == pytest.approx(share, abs=0.2)
    assert history.worth == pytest.approx(1, abs=0.12)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_prompts_never_seen_have_the_prior(shape):
    history, world = LengthHistory(LONGEST), World(shape, prompts=768, members=4)
    told = Player(history).play(world.epoch(), 0)[1024:]
    covered = sum(low <= length <= high for _, low, high, length in told) / len(told)
    assert covered == pytest.approx(0.8, abs=0.06)
    assert sum(t[0] for t in told) / sum(t[3] for t in told) == pytest.approx(1, abs=0.15)
    assert history.skill == 0
    assert history.calibration().known == 0
    assert history.calibration().rank_correlation is None


def test_intervals_hold_where_half_of_the_responses_reach_the_longest():
    rng, player, covered = random.Random(0), Player(LengthHistory(96), batch=8), []
    for epoch in range(4):
        groups = [
            (row, [min(96, rng.randint(2, 190)) for _ in range(4)])
            for row in rng.sample(range(32), 32)
        ]
        told = player.play(groups, epoch)
        if epoch:
            covered += [low - 0.5 <= length <= high + 0.5 for _, low, high, length in told]
    assert sum(covered) / len(covered) > 0.75


def test_intervals_of_members_that_wait_while_others_have_finished():
    player = Player(LengthHistory(LONGEST), batch=32)
    player.play(World(prompts=384).epoch(), 0)
    history, covered, seen = player.history, 0, 0
    for group, (_, lengths) in enumerate(World(prompts=384, seed=1).epoch(), 10**6):
        history.open(group, group, 1)
        for member in range(4):
            history.finished(TrajectoryId(group, member), lengths[member])
        low, high = history.quantile(group, 0.1), history.quantile(group, 0.9)
        covered += sum(low <= length <= high for length in lengths[4:])
        seen += 4
    assert covered / seen == pytest.approx(0.8, abs=0.04)


# -- histories that stop being true ----------------------------------------------------------------


def test_a_history_that_is_no_longer_true_counts_for_nothing_soon_and_then_again():
    world, history = World(prompts=192), LengthHistory(LONGEST)
    player = Player(history, batch=8)
    for epoch in (0, 1, 2):
        player.play(world.epoch(), epoch)
    assert history.skill > 0.4
    assert history.worth > 0.8
    shuffled = list(world.epoch(shuffled=True))
    player.play(shuffled[:24], 3)  # 192 responses
    assert history.skill < 0.1
    assert history.worth < 0.3
    player.play(shuffled[24:], 3)
    assert history.skill < 0.05
    assert history.worth < 0.2
    told = player.play(world.epoch(shuffled=True), 4)
    covered = sum(low <= length <= high for _, low, high, length in told) / len(told)
    assert covered == pytest.approx(0.8, abs=0.07), "and the intervals are wide again"
    for epoch in (5, 6):
        player.play(world.epoch(), epoch)
    assert history.skill > 0.35
    assert history.worth > 0.6


def test_prompts_that_say_nothing_get_no_skill():
    world, history = World(prompts=96), LengthHistory(LONGEST)
    player, found = Player(history, batch=8), []
    for epoch in range(6):
        for group in range(0, 96, 8):
            batch = [(row, world.responses(0.0)) for row in range(group, group + 8)]
            player.play_batch(batch, epoch)
            found.append(history.skill)
    assert max(found) < 0.1


def test_all_lengths_double():
    world, history = World(prompts=192), LengthHistory(LONGEST)
    player = Player(history, batch=8)
    for epoch in (0, 1):
        player.play(world.epoch(), epoch)
    groups = list(world.epoch(times=2.0))
    told = player.play(groups, 2)
    first, rest = told[:64], told[16 * 8 : 80 * 8]
    assert sum(t[0] for t in first) / sum(t[3] for t in first) < 0.75
    assert sum(t[0] for t in rest) / sum(t[3] for t in rest) == pytest.approx(1, abs=0.15)
    assert history.worth > 0.8, "what history says of differences is as true as before"
    told = player.play(world.epoch(times=2.0), 3)
    assert sum(t[0] for t in told) / sum(t[3] for t in told) == pytest.approx(1, abs=0.12)


def test_one_prompt_doubles():
    world, history = World(prompts=64), LengthHistory(LONGEST)
    player, found = Player(history), []
    for epoch in range(5):
        groups = list(world.epoch())
        times = 2 if epoch >= 2 else 1
        groups = [(row, [500 * times] * 8 if row == 0 else ls) for row, ls in groups]
        told = player.play(groups, epoch)
        at = 8 * [row for row, _ in groups].index(0)
        found.append(told[at][0])
    assert found[3] > 1.3 * found[2]
    assert found[4] > found[3]


# -- those that finish first are the short ones ----------------------------------------------------


@pytest.mark.parametrize("known", [True, False], ids=["known", "never seen"])
def test_survivors_are_foretold_without_bias(known):
    """Against what truly comes: groups of the same world, all members started together."""
    ratios: dict[str, list[float]] = {"none": [0, 0], "few": [0, 0], "most": [0, 0]}
    coverage = [0, 0]
    for seed in range(3):
        world, history = World(seed=seed, prompts=384), LengthHistory(LONGEST)
        player = Player(history, batch=32)
        for epoch in range(2 if known else 1):
            player.play(world.epoch(), epoch)
        for group, (row, lengths) in enumerate(world.epoch(), 10**6):
            history.open(group, row if known else group, 2)
            done: set[int] = set()
            for made in (300, 600, 1000, 1500, 2500, 4000):
                for member, length in enumerate(lengths):
                    if length <= made and member not in done:
                        history.finished(TrajectoryId(group, member), length)
                        done.add(member)
                left = [length for length in lengths if length > made]
                if not left:
                    break
                stage = "none" if not done else "few" if len(done) < 4 else "most"
                ratios[stage][0] += len(left) * (history.expected(group, made) - made)
                ratios[stage][1] += sum(length - made for length in left)
                low, high = (history.quantile(group, q, made) for q in (0.1, 0.9))
                coverage[0] += sum(low <= length <= high for length in left)
                coverage[1] += len(left)
    found = {stage: a / b for stage, (a, b) in ratios.items()}
    assert found == pytest.approx(dict.fromkeys(found, 1.0), abs=0.15)
    assert coverage[0] / coverage[1] == pytest.approx(0.8, abs=0.05)


def test_the_longer_nobody_finishes_the_longer_all_will_be():
    """More than a single survivor would say: all of the group are that long."""
    player = Player(LengthHistory(LONGEST), batch=32)
    player.play(World(prompts=384).epoch(), 0)
    history = player.history
    history.open(10**6, 10**6, 1)
    alone = LengthHistory(LONGEST)
    world = World(prompts=384)
    Player(alone, batch=32).play([(r, [ls[0]]) for r, ls in world.epoch()], 0)
    alone.open(10**6, 10**6, 1)
    assert history.expected(10**6, 3000) > 1.1 * alone.expected(10**6, 3000)


def test_a_finished_sibling_says_something():
    player = Player(LengthHistory(LONGEST), batch=32)
    player.play(World(prompts=384).epoch(), 0)
    history, found = player.history, []
    for group, length in ((10**6, 300), (10**6 + 1, 6000)):
        history.open(group, group, 1)
        history.finished(TrajectoryId(group, 0), length)
        found.append(history.expected(group))
    assert found[0] < 0.5 * found[1]
