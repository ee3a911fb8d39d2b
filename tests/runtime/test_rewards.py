"""Which responses reward functions are called with, when, and what is reported; no processes."""

from contextlib import closing
from functools import partial
from types import SimpleNamespace

import pytest

from rhymeflow.config import Config
from rhymeflow.core import events
from rhymeflow.core.types import TrajectoryId
from rhymeflow.data.load import RunPrompts
from rhymeflow.data.prompts import Prompt
from rhymeflow.data.stream import PromptStream
from rhymeflow.errors import UserError
from rhymeflow.reward.messages import TrainerState
from rhymeflow.runtime.environments import Environments
from rhymeflow.runtime.in_flight import InFlight
from rhymeflow.runtime.rewards import Rewards
from rhymeflow.runtime.throughput import Throughput
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.writer import SqliteTrajectoryStore
from rhymeflow.workers.messages import CloseEpisodes, NoReward, Part, RewardComputed
from tests.fake_run.models import Letters

SOURCE = [Prompt(row, "p", {"answer": row}) for row in range(2)]
ALONE = {"function": "exact_match", "weight": 10.0}
RANK = {"function": "a/b.py:rank", "weight": 0.5}


class Run:
    """The controller's part of a run with groups of three."""

    def __init__(self, store, *functions, on_failure="drop", learner=None):
        self.store = store
        stream = PromptStream(SOURCE, seed=0, shuffle=False)
        prompts = RunPrompts(SOURCE, stream, Letters(), SOURCE)
        config = Config.model_validate(
            {
                "rollout": {"num_generations": 3},
                "learner": {"max_steps": 9} | (learner or {}),
                "reward": {"functions": list(functions), "on_failure": on_failure},
            }
        )
        self.in_flight, self.sent, self.closed = InFlight(store, prompts), [], []
        workers = SimpleNamespace(
            rewards=SimpleNamespace(send=self.sent.append),
            environments=SimpleNamespace(send=self.closed.append),
        )
        reporter = SimpleNamespace(log=lambda message, prefix: None)
        self.rewards = Rewards(config, workers, store, self.in_flight, reporter, 4)
        self.environments = Environments(
            config, workers, self.in_flight, self.rewards, Throughput()
        )
        self.in_flight.add(self.in_flight.draw())

    def finish(self, *members):
        """These responses to the first prompt end; member m says m."""
        for member in members:
            trajectory = TrajectoryId(0, member)
            self.in_flight.take("r", Part(trajectory, 0, 0, 1, 0, [member], [-1.0]))
            self.environments.finished(trajectory, "stop")

    def asked(self):
        """What was asked since the last time: (responses, functions)."""
        asked = [([tokens[0] for tokens in each.responses], each.functions) for each in self.sent]
        self.last, self.sent[:] = list(self.sent), []
        return asked

    def answer(self, message, *components):
        return self.take(message, RewardComputed, list(components))

    def fail(self, message):
        return self.take(message, NoReward, "boom")

    def take(self, message, kind, what):
        texts = [f"text {tokens[0]}" for tokens in message.responses]
        return list(self.rewards.take(kind(message.key, texts, what)))

    def stored(self):
        """(reward, components, text) by member."""
        self.store.commit()
        with closing(TrajectoryReader(self.store.path)) as reader:
            rows = reader.query("SELECT member, reward, components, text FROM trajectories")
        return {member: what for member, *what in rows}


@pytest.fixture
def start(tmp_path):
    with closing(SqliteTrajectoryStore(tmp_path / "events.db")) as store:
        yield partial(Run, store)


def rewarded(*pairs):
    return [events.TrajectoryRewarded(TrajectoryId(0, m), reward) for m, reward in pairs]


def test_rewards_that_are_compared_one_by_one_are_reported_with_what_they_are_of(start):
    run = start(ALONE, learner={"multi_objective_aggregation": "normalize_then_sum"})
    run.finish(2)
    run.asked()
    [event] = run.answer(run.last[0], {"exact_match": 0.5})
    assert event == events.TrajectoryRewarded(TrajectoryId(0, 2), 5.0, {"exact_match": (10.0, 0.5)})


def test_a_function_per_group_is_called_once_with_the_members_that_are_trained_on(start):
    """The first three to end, in the order of their numbers; what ends later is never handed in."""
    run = start(RANK)
    run.finish(4, 1)
    assert run.asked() == []
    run.finish(2)
    assert run.asked() == [([1, 2, 4], (0,))]
    [call] = run.last
    assert (call.prompt, call.columns) == ("p", {"answer": 0})
    assert call.trainer_state == TrainerState(4, 9)
    run.finish(0, 3)
    found = run.answer(call, {"rank": 0.0}, {"rank": 1.0}, {"rank": 2.0})
    assert found == rewarded((1, 0.0), (2, 0.5), (4, 1.0))
    run.finish(5)
    assert run.asked() == [], "three more have ended, but the group has what it needs"
    assert run.stored() == {
        0: [None, None, None],
        1: [0.0, '{"rank":0.0}', "text 1"],
        2: [0.5, '{"rank":1.0}', "text 2"],
        3: [None, None, None],
        4: [1.0, '{"rank":2.0}', "text 4"],
        5: [None, None, None],
    }


def test_of_a_mixed_list_each_is_called_in_its_own_time_and_all_are_summed(start):
    run = start(RANK, ALONE)
    run.finish(0, 1, 2, 3)
    assert run.asked() == [([0], (1,)), ([1], (1,)), ([2], (1,)), ([3], (1,))]
    calls = run.last
    assert run.answer(calls[3], {"exact_match": 0.0}) == []
    assert run.answer(calls[1], {"exact_match": 1.0}) == []
    assert run.answer(calls[0], {}) == [], "it may not apply"
    assert run.asked() == [([0, 1, 3], (0,))], "the first three that were judged by themselves"
    [together] = run.last
    assert run.answer(calls[2], {"exact_match": 1.0}) == [], "surplus"
    found = run.answer(together, {"rank": 2.0}, {"rank": 4.0}, {})
    assert found == rewarded((0, 1.0), (1, 12.0), (3, 0.0))
    assert run.stored()[1] == [12.0, '{"rank":4.0,"exact_match":1.0}', "text 1"]
    assert run.asked() == []


def failed(*members, error="boom"):
    return [events.RewardFailed(TrajectoryId(0, member), error) for member in members]


def test_a_group_call_that_fails_is_a_reward_for_none_of_its_members(start):
    run = start(RANK)
    run.finish(0, 1, 2, 3)
    run.asked()
    assert run.fail(run.last[0]) == failed(0, 1, 2)
    assert run.asked() == []
    assert run.stored()[1] == [None, None, "text 1"]
    run.finish(4, 5)
    assert run.asked() == [([3, 4, 5], (0,))], "spare ones, if the coordinator goes on"


@pytest.mark.parametrize("functions", [(ALONE,), (RANK,)])
def test_a_failure_can_stop_the_run(start, functions):
    run = start(*functions, on_failure="stop")
    run.finish(0, 1, 2)
    with pytest.raises(UserError, match="boom"):
        run.fail(run.sent[0])


def test_failures_in_a_row_stop_the_run_and_others_do_not(start):
    run = start(ALONE)
    run.finish(*range(21))
    asked = list(run.sent)
    for message in asked[:9]:
        run.fail(message)
    run.answer(asked[9], {"exact_match": 0.5})
    for message in asked[10:19]:
        run.fail(message)
    with pytest.raises(UserError, match=r"^boom; 10 calls in a row failed"):
        run.fail(asked[19])


def test_a_weighted_sum_that_float32_cannot_square_is_no_reward(start):
    run = start(ALONE, on_failure="stop")
    run.finish(0)
    [message] = run.sent
    with pytest.raises(UserError, match=r"exact_match, .*weighted sum is -5e\+15, .* 1e\+15"):
        run.answer(message, {"exact_match": -5e14})


def test_tools_of_a_response_that_is_over_are_closed_whatever_ended_it(start):
    run = start(ALONE)
    run.in_flight[0].turns_ended[1] = 1  # its environment was asked once
    run.finish(0, 1)
    assert run.closed == [CloseEpisodes(["trajectory 0.1"])]
