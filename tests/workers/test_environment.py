"""The environment worker, in this process: turns in, answers out, by a real connection."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rhymeflow.config import Config
from rhymeflow.utils import process
from rhymeflow.workers import environment, messages
from rhymeflow.workers.messages import AskEnvironment, Episode, receive, send
from tests.environments.test_rendering import CHATML, ids, tokenizer
from tests.environments.worlds import FILE

Worker = Callable[..., Any]


@pytest.fixture
def worker(tmp_path, monkeypatch, serving):
    """Start a worker with these environments; returns the controller's end."""
    monkeypatch.setattr(process, "_output", tmp_path / "log")

    def _start(tok: Any, *names: str, **fields: Any) -> Any:
        monkeypatch.setattr(environment, "load_settled", lambda config: (tok, None))
        classes = [{"environment": f"{FILE}:{name}"} for name in names]
        section = {"classes": classes, "retries": 0} | fields
        config = Config.model_validate({"environment": section})
        return serving(environment.main, "environment", config, tmp_path)

    return _start


TEXT, CHAT = tokenizer(None), tokenizer(CHATML)


def episode(*turns: str, observed: Any = (), tok: Any = TEXT, key: str = "3.1", **columns: Any):
    return Episode(
        key, 5, 0, "begin", columns, [ids(tok, each) for each in turns],
        [ids(tok, each) for each in observed],
    )  # fmt: skip


def answer(connection: Any) -> Any:
    """The next one, after what is told of the environments' prints."""
    assert connection.poll(60)
    message = receive(connection)
    return answer(connection) if isinstance(message, messages.Printed) else message


def ask(connection: Any, *turns: str, room: int = 300, **options: Any) -> Any:
    send(connection, AskEnvironment(episode(*turns, **options), "answer", room))
    return answer(connection)


def test_turns_are_answered_in_tokens_and_the_episode_judged(worker):
    ours = worker(TEXT, "Echo", max_turns=3)
    first = ask(ours, "abc<|im_end|>")
    assert isinstance(first, messages.TurnAnswered)
    assert (first.key, first.turn, first.answer) == ("3.1", 1, ids(TEXT, "abc"))
    assert first.figures.seconds >= 0
    second = ask(ours, "abc", "count", observed=["abc"])
    assert TEXT.decode(second.answer) == "4 2"
    third = ask(ours, "abc", "count", "x", observed=["abc", "4 2"])
    assert (third.turn, third.answer) == (3, "max_turns")
    send(ours, AskEnvironment(episode("abc", "count", "x", observed=["abc", "4 2"]), "reward"))
    assert answer(ours) == messages.EpisodeJudged("3.1", {"Echo": 3.0})
    assert (ask(ours, "bye").answer, ask(ours, "abcd", room=3, key="4.0").answer) == (
        "stop", "length",
    )  # fmt: skip


def test_a_failure_is_no_reward_and_closed_episodes_are_not_answered(worker):
    ours = worker(TEXT, "Echo")
    assert "raised ValueError: no, thank you" in ask(ours, "raise").error
    send(ours, AskEnvironment(episode("slow", key="9.0"), "answer", 10))
    send(ours, messages.CloseEpisodes(["9.0", "9.9"]))
    assert ask(ours, "a").key == "3.1"
    send(ours, AskEnvironment(episode("a", key="9.1", colour="nothing"), "reward"))
    assert answer(ours) == messages.EpisodeJudged("9.1", {})


def test_a_chat_is_continued_by_its_template(worker):
    ours = worker(CHAT, "Counter", tools=[f"{FILE}:multiply"])
    call = '<tool_call>{"name": "add", "arguments": {"amount": 2}}</tool_call>'
    said = ask(ours, f"{call}{call}<|im_end|>", tok=CHAT, start=1)
    assert CHAT.decode(said.answer) == (
        "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (said.figures.calls, said.figures.failed_calls) == (2, 0)
    bad = ask(ours, "<tool_call>{<|im_end|>", tok=CHAT, key="3.2")
    assert "cannot be read" in CHAT.decode(bad.answer)
    assert (bad.figures.calls, bad.figures.failed_calls) == (1, 1)
    assert ask(ours, "done<|im_end|>", tok=CHAT, key="3.3").answer == "stop"


def test_an_environment_opens_with_text_that_stays_what_it_was(worker):
    ours = worker(TEXT, "Opens", "Echo")
    for kind, opening in (("Opens", "Welcome."), ("Echo", "")):
        send(ours, AskEnvironment(episode(environment=kind, key=kind), "opening"))
        assert answer(ours) == messages.EpisodeOpened(kind, opening)
    fields = {"environment": "Opens", "key": "Opens"}
    said = msgspec.structs.replace(episode("a", **fields), opening="Welcome.")
    for again in (said, msgspec.structs.replace(said, key="elsewhere")):
        send(ours, AskEnvironment(again, "answer", 100))
        assert TEXT.decode(answer(ours).answer) == "beginWelcome."
    send(ours, AskEnvironment(msgspec.structs.replace(said, key="x", opening="Hi."), "answer", 100))
    assert "environment of x, reset: is not reproducible" in answer(ours).error


def test_what_the_template_refuses_is_a_failure(worker):
    tok = tokenizer(CHATML.replace("{{ '<|im", "{% if m.role == 'narrator' %}"
        "{{ raise_exception('no narrators') }}{% endif %}{{ '<|im", 1))  # fmt: skip
    ours = worker(tok, "Echo")
    failed = ask(ours, "answer<|im_end|>", tok=tok)
    assert isinstance(failed, messages.EpisodeFailed)
    assert "turn 1: the chat template refuses its answer: no narrators" in failed.error
    again = ask(ours, "answer<|im_end|>", "a<|im_end|>", observed=["a"], tok=tok)
    assert "the chat template refuses its answer" in again.error


def test_a_row_says_which_of_several_answers_it(worker):
    ours = worker(TEXT, "Echo", "Sleeper")
    assert ask(ours, "a", environment="Sleeper").answer == "stop"
    send(ours, AskEnvironment(episode("a", environment="Sleeper"), "reward"))
    assert answer(ours) == messages.EpisodeJudged("3.1", {})
    assert isinstance(ask(ours, "a", environment="Echo", key="4.0"), messages.TurnAnswered)
