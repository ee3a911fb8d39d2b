"""The built-in `llm_judge` against a server that behaves and misbehaves."""

import pytest

from rhymeflow.config import RewardFunction
from rhymeflow.errors import UserError
from rhymeflow.reward.functions import Judge, NotAReward
from tests.openai_servers import KEY, serving
from tests.reward import judged


def length_in_quotes(server, body):
    """The length of what stands in quotes, in the words that the server says."""
    length = len(body["messages"][0]["content"].split('"')[1])
    return {"message": {"content": server.says.format(length)}}


@pytest.fixture
def server(monkeypatch):
    with serving(monkeypatch, length_in_quotes) as made:
        made.says = "I would say {}."
        yield made


def judge(server, texts, prompt='Rate "{completion}" to {prompt}, {answer}', **options):
    given = {"url": server.url, "model": "m", "prompt": prompt, **options}
    judging = Judge(RewardFunction(function="llm_judge", options=given))
    return [judged(judging, texts, {"answer": "no"}, prompt="why") for _ in "12"]


def test_each_response_is_judged_and_no_question_is_asked_twice(server):
    first, second = judge(server, ["a", "bbb", "a"], concurrency=1, scale=2)
    assert first == second == [0.5, 1.5, 0.5]
    assert len(server.asked) == 2
    path, key, body = server.asked[0]
    assert (path, key) == ("/v1/chat/completions", f"Bearer {KEY}")
    assert body["messages"][0]["content"] == 'Rate "a" to why, no'
    assert body["model"] == "m"


def test_a_group_is_judged_at_once(server):
    server.seconds = 0.1
    judge(server, [f"response {i}" for i in range(8)], concurrency=4)
    assert server.most_at_once == 4


def test_a_server_that_is_busy_is_asked_again(server):
    server.errors = [503, 429]
    assert judge(server, ["abc"])[0] == [3.0]
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("errors", "says", "problem", "asked"),
    [
        ([401] * 9, "{}", "HTTP 401", 1),
        ([500] * 9, "{}", "HTTP 500", 3),
        ([], "no idea", "has no reward: 'no idea'", 1),
    ],
)
def test_what_is_no_reward_is_an_error_without_the_key(server, errors, says, problem, asked):
    server.errors, server.says = errors, says
    with pytest.raises(NotAReward, match=problem) as raised:
        judge(server, ["abc"], retries=2)
    assert len(server.asked) == asked
    assert KEY not in str(raised.value)


def test_a_server_that_is_silent_or_gone_is_an_error(server):
    server.seconds = 1.0
    with pytest.raises(NotAReward, match="timed out"):
        judge(server, ["abc"], timeout=0.1, retries=0)
    server.server_close()
    with pytest.raises(NotAReward, match=r"127\.0\.0\.1"):
        judge(server, ["abc"], retries=0, timeout=0.2)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"url": "localhost"}, "url is 'localhost', should begin with http"),
        ({"pattern": "("}, "is no regular expression"),
        ({"pattern": "a"}, "has no group"),
        ({"scale": 0}, "scale is 0"),
        ({"key": "x"}, "no option 'key'"),
    ],
)
def test_wrong_options_are_refused(options, problem):
    given = {"url": "http://x/v1", "model": "m", "prompt": "p", **options}
    with pytest.raises(UserError, match=problem):
        Judge(RewardFunction(function="llm_judge", options=given))
