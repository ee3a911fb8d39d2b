"""The reward worker, in this process: responses in, text and rewards out, by a real connection."""

import time

import pytest

from rhymeflow.config import RewardConfig
from rhymeflow.reward.calls import reward_pool
from rhymeflow.reward.messages import TrainerState
from rhymeflow.workers.messages import ComputeReward, NoReward, RewardComputed, receive, send
from rhymeflow.workers.reward import RewardWorker

BODY = """
def length(prompts, completions, completion_ids, weight, **columns):
    if isinstance(completions[0], list):
        said = [f"{each['role']}:{each['content']}" for each in completions[0]]
        return [float(said == ["assistant:ab", "tool:c", "assistant:d"])]
    if "!" in "".join(completions):
        raise ValueError("no shouting")
    return [weight[0] * len(text) for text in completions]
"""


def decode(tokens):
    return "".join(map(chr, tokens))


def ask(key, *texts, **columns):
    responses = [[ord(letter) for letter in text] for text in texts]
    return ComputeReward(key, "a prompt", responses, columns, (0,), TrainerState(0, 1))


@pytest.fixture
def ours(tmp_path, serving):
    """The controller's end of a worker."""
    return served(tmp_path, serving)


def served(tmp_path, serving, latency=0.0):
    path = tmp_path / "rewards.py"
    path.write_text(BODY)
    functions = {"functions": [{"function": f"{path}:length"}], "retries": 0, "num_workers": 1}
    pool = reward_pool(RewardConfig.model_validate(functions))
    pool.start()

    def main(theirs):
        worker = RewardWorker(theirs, pool, ["length"], decode)
        worker.latency = latency
        worker.serve()
        pool.close()

    return serving(main)


def answers(connection, count):
    """The next answers, by key; signs of life left out."""
    found = {}
    while len(found) < count:
        assert connection.poll(30)
        message = receive(connection)
        found[message.key] = message
    return found


def test_functions_are_given_the_turns_of_a_conversation(ours):
    """The last message is what the policy said last, with or without answers before. A tool's
    answer is not the policy's where the prompt is text, with answers of a tool or without."""
    tokens = [ord(letter) for letter in "abcd"]
    asked = {"0.0": ([{"role": "user", "content": "?"}], [(2, 3)]), "0.1": ("?", [(2, 3)]),
             "0.2": ("?", [])}  # fmt: skip
    for key, (prompt, turns) in asked.items():
        state = TrainerState(0, 1)
        send(ours, ComputeReward(key, prompt, [tokens], {"weight": 1}, (0,), state, [turns]))
    assert answers(ours, 3) == {
        key: RewardComputed(key, ["abcd"], [{"length": reward}], [last])
        for key, reward, last in (("0.0", 1.0, "d"), ("0.1", 1.0, "d"), ("0.2", 0.0, "abcd"))
    }


def test_without_functions_the_text_is_all_that_is_answered(ours):
    message = ComputeReward("0.0", "p", [[97], [98]], {}, (), TrainerState(0, 1))
    send(ours, message)
    assert answers(ours, 1) == {"0.0": RewardComputed("0.0", ["a", "b"], [{}, {}])}


def test_an_error_is_no_reward_and_says_whose_it_is(ours):
    send(ours, ask("trajectory 7.1", "no!", weight=1))
    send(ours, ask("7.2", "yes", weight=1))
    found = answers(ours, 2)
    failed = found["trajectory 7.1"]
    assert isinstance(failed, NoReward)
    assert failed.texts == ["no!"]
    assert "'length', trajectory 7.1" in failed.error
    assert "no shouting" in failed.error
    assert found["7.2"].components == [{"length": 3.0}]


def test_emulated_rewards_take_as_long_as_on_the_cluster_any_number_at_once(tmp_path, serving):
    connection, began = served(tmp_path, serving, latency=0.3), time.monotonic()
    for number in range(8):
        send(connection, ask(f"{number}.0", "ab", weight=1))
    assert not connection.poll(0.25)
    found = answers(connection, 8)
    assert 0.3 <= time.monotonic() - began < 1.0
    assert all(each.components == [{"length": 2.0}] for each in found.values())
