"""An agent's programs, their real processes and their real HTTP; the policy is this file."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.config import Config
from rhymeflow.data.text import StopTexts, before_stop
from rhymeflow.environments import launcher
from rhymeflow.environments.agent_server import AgentServer, HttpAnswer
from rhymeflow.environments.agents import Agents, AgentTask, check_program
from rhymeflow.environments.conversations import Conversations
from rhymeflow.environments.dialects import read
from rhymeflow.environments.episode import Episode, Until
from rhymeflow.environments.messages import Answered, Called, Left, Rewarded
from rhymeflow.errors import UserError
from rhymeflow.store.branches import Asked, stretches
from rhymeflow.utils import objects
from rhymeflow.utils.child import descendants
from rhymeflow.utils.objects import LOOPBACK
from tests.environments.programs import ADD, FILE, user
from tests.environments.test_rendering import CHATML, FORGETS, ids, tokenizer
from tests.refused import refusal
from tests.weights.shared_objects import sharing

CHAT = tokenizer(CHATML)
WORLDS = Path(FILE).with_name("worlds.py")
END = "<|im_end|>"


class Play:
    """Episodes of one agent, whose turns are given as text."""

    def __init__(self, agents: Agents, tok: Any) -> None:
        self.agents, self.tok = agents, tok
        self.rows: dict[str, list[int]] = {}
        self.asked: dict[str, list[Called]] = {}
        """In the order of their answers."""
        self.calls: dict[str, list[Asked]] = {}
        self.left: list[int] = []
        self.patience = 30.0  # seconds until something is said

    def next(self) -> AgentTask:
        """What is said next."""
        until = time.monotonic() + self.patience
        while not (done := self.agents.poll(time.monotonic())):
            assert time.monotonic() < until
            self.agents.wait(0.1)
        self.agents._finished = [*done[1:], *self.agents._finished]
        return done[0]

    def begin(self, key: str = "3.1", room: int = 300, **columns: Any) -> None:
        self.rows[key], self.asked[key], self.calls[key] = [], [], []
        prompt = columns.pop("prompt", "begin")
        episode = Episode(key, 5, 0, prompt, columns, [[]], [])
        self.agents.submit(self.agents.task(episode, "answer", room))

    def answer(self, called: Called, text: str, key: str = "3.1", reason: Any = None) -> None:
        row = self.rows[key]
        self.calls[key].append(Asked(len(row), len(row) + len(called.tokens), called.follows))
        self.asked[key].append(called)
        turn = ids(self.tok, text)
        row += [*called.tokens, *turn]
        reason = reason or ("stop" if text.endswith(END) else "length")
        self.agents.answer(key, called.number, turn, [-1.0] * len(turn), len(row), reason)

    def called(self) -> Called:
        """The next call."""
        task = self.next()
        assert isinstance(task.result, Called), task
        return task.result

    def grow(self, called: Called, turn: list[int], key: str = "3.1") -> None:
        """Generate more of a turn."""
        self.agents.grow(key, called.number, turn, [-1.0] * len(turn))

    def end(self, key: str = "3.1", room: int = 300) -> Any:
        """The reward of a program that ends, or the error."""
        task = self.next()
        if task.error is not None:
            return task.error
        assert isinstance(task.result, Answered), task.result
        episode = Episode(key, 5, 0, "", {}, [[]], [])
        self.agents.submit(self.agents.task(episode, "reward", room))
        return self.next().result.value

    def episode(
        self,
        says: Callable[[int], str | None],
        key: str = "3.1",
        room: int = 300,
        at_once: int = 1,
        **columns: Any,
    ) -> Any:
        """Play to the end; return the reward, or the error. So many calls wait before the last of
        them is answered."""
        self.begin(key, room, **columns)
        waiting: list[Called] = []
        while True:
            task = self.next()
            if task.error is not None:
                return task.error
            match task.result:
                case Called():
                    waiting.append(task.result)
                    while len(waiting) >= at_once:
                        said = says(len(self.asked[key]) + 1)
                        called = waiting.pop()
                        if said is not None:
                            self.answer(called, said, key)
                        at_once = max(len(waiting), 1)
                case Left(number=number):
                    self.left.append(number)
                case Answered():
                    episode = Episode(key, 5, 0, "", columns, [[]], [])
                    self.agents.submit(self.agents.task(episode, "reward", room))
                case Rewarded(value=value):
                    return value

    def read(self, key: str = "3.1") -> list[str]:
        """What the policy read before each turn, as text."""
        row, calls = self.rows[key], self.calls[key]
        parts = [stretches(calls, each.end) for each in calls]
        return [self.tok.decode([t for a, b in part for t in row[a:b]]) for part in parts]


@pytest.fixture
def playing(tmp_path) -> Iterator[Callable[..., Play]]:
    started: list[Agents] = []

    def start(agent: Any, tok: Any = CHAT, functions: Any = (), **fields: Any) -> Play:
        name = f"{FILE}:{agent}" if isinstance(agent, str) and agent != "classes" else agent
        section = {"agent": name, "idle_timeout": 20.0, **fields}
        config = Config.model_validate(
            {
                "environment": section,
                "reward": {"functions": functions},
                "rollout": {"max_completion_length": 120},
            }
        )
        agents = Agents(config, tok, tmp_path / "log", LOOPBACK)
        started.append(agents)
        agents.start()
        return Play(agents, tok)

    yield start
    for each in started:
        each.close()


def test_a_conversation_goes_on_with_its_own_tokens_and_any_other_begins_anew(playing):
    play = playing("talks")
    says = ["4 2", "22", "x", "y", "z"]
    assert play.episode(lambda n: f"{says[n - 1]}{END}", prompt="a", branches=True) == 0.2
    head = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    on = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    first, second, edited, other, summary = play.read()
    assert first == head
    assert second == head + "4 2" + on.format("go on")
    assert edited == head + "0" + on.format("go on")
    assert other == head + "4 2" + on.format("or else")
    assert summary == head.replace("\na<", "\nsummary<")
    calls = play.asked["3.1"]
    end = len(ids(CHAT, head + f"4 2{END}"))
    assert [each.follows for each in calls] == [0, end, 0, end, 0]
    assert [each.until.max_tokens for each in calls] == [None] * 4 + [2]
    assert calls[0].figures.seconds > 0


def test_what_a_tool_answers_follows_the_call_as_it_was_written(playing):
    """Two spaces in the call, which no encoding of the conversation would have, are still there."""
    play = playing("uses_tools")
    call = 'so <tool_call>{"name":  "add", "arguments": {"a": 41}}</tool_call>'
    says = [call, "42", "43"]
    assert play.episode(lambda n: f"{says[n - 1]}{END}", prompt="add to a") == 42.0
    first, second, third = play.read()
    assert second == (
        f"{first}{call}<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [each.follows == 0 for each in play.asked["3.1"]] == [True, False, True]
    assert call not in third
    assert [each.figures.calls for each in play.asked["3.1"]] == [0, 1, 0]


def test_a_template_that_forgets_has_sequences_of_its_own(playing):
    play = playing("talks", tokenizer(FORGETS))
    turn = f"so</think>4{END}"
    play.episode(lambda n: turn, prompt="a")
    assert [each.follows for each in play.asked["3.1"]] == [0, 0]
    assert "so" not in play.read()[1]


ROW = {"prompt": "a", "a": 0.5, "b": 1}
STEPS = {"environment": f"{FILE}:Steps", "options": {"answer": "{} more"}}


def test_a_class_with_step_is_played_with_a_template_that_forgets(playing):
    play = playing("classes", tokenizer(FORGETS), classes=[STEPS])
    says = ["so</think>4", "well</think>5", "done"]
    assert play.episode(lambda n: f"{says[n - 1]}{END}", **ROW) == 2.5
    assert [each.follows for each in play.asked["3.1"]] == [0, 0, 0]
    first, _, third = play.read()
    assert first == "<|im_start|>user\na Begin.<|im_end|>\n<|im_start|>assistant\n"
    said = ["4", "user\n1 more", "assistant\n5", "user\n2 more", "assistant\n"]
    assert third == first + "<|im_end|>\n<|im_start|>".join(said)


@pytest.mark.parametrize(
    ("says", "ends"),
    [
        (["4", "5", "6", "7"], 3.5),  # max_turns
        (["long", "done"], 1.5),
        (["4" * 200], 1.5),  # there is no room for another turn
        (["wrong"], "step returned a list with str 'no message', which is no message"),
    ],
)
def test_how_a_class_with_step_ends(playing, says, ends):
    play = playing("classes", classes=[STEPS], max_turns=3, max_observation_chars=20)
    value = play.episode(lambda n: f"{says[n - 1]}{END}", **ROW)
    assert str(ends) in str(value)
    follows = [each.follows for each in play.asked["3.1"]]
    assert all(follows[1:]), "where the template appends, turns continue each other"
    if says[0] == "long":
        assert "12345678901234567890\n[cut: 20 of 24 characters]<" in play.read()[1]
        assert "\n[cut: 0 of 2 characters]<" in play.read()[1]


TURN = "<|im_start|>{}\n{}<|im_end|>\n"
ADDS = '<tool_call>{"name": "add", "arguments": {"amount": 2}}</tool_call>'


def test_a_class_with_tools_is_played(playing):
    """Its tools and functions are in every call of the policy; a call that cannot be read, and a
    tool that raises, are answered."""
    template = (
        "{% if tools %}{{ tools | map(attribute='function') | map(attribute='name') | list }}"
        "{% endif %}" + FORGETS.replace("<|im_end|>", "{% for c in m.tool_calls or [] %}"
        "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>")
    )  # fmt: skip
    entry = {"environment": f"{WORLDS}:Counter", "options": {"step": 3}}
    tools = [f"{WORLDS}:multiply"]
    play = playing("classes", tokenizer(template), classes=[entry], tools=tools)
    fails = ADDS.replace("add", "fail").replace('{"amount": 2}', "{}")
    says = [f"so</think>{ADDS}{ADDS}", fails, ADDS[:30] + ADDS[-12:], "done"]
    row = {"prompt": "a", "start": 1}
    assert play.episode(lambda n: f"{says[n - 1]}{END}", room=2000, **row) == 13.0
    read = play.read()
    assert read[0] == "['multiply', 'add', 'fail']" + TURN.format("user", "a") + (
        "<|im_start|>assistant\n"
    )
    answers = [TURN.format("tool", 7) + TURN.format("tool", 13)]
    answers.append(TURN.format("tool", "Error: RuntimeError: at 13"))
    answers.append(TURN.format("user", "Error: the tool call cannot be read: it is no JSON: "))
    for text, answer in zip(read[1:], answers, strict=True):
        assert answer.removesuffix("<|im_end|>\n") in text
    assert "so</think>" not in read[1]


def test_tools_alone_are_played_and_give_no_reward(playing):
    play = playing(
        "classes", tokenizer(FORGETS), [{"function": "a.py:f"}], tools=[f"{WORLDS}:multiply"]
    )
    calls = '<tool_call>{"name": "multiply", "arguments": {"a": 2, "b": 4}}</tool_call>'
    says = [f"{calls}{END}", f"8{END}"]
    assert play.episode(lambda n: says[n - 1], prompt="multiply", room=2000) is None
    assert TURN.format("tool", 8) in play.read()[1]


def test_an_option_that_no_played_class_takes_is_refused(tmp_path):
    for options, said in (({"speed": 1}, "takes no option 'speed'"), ({}, "needs the option")):
        entry = {"environment": f"{FILE}:Steps", "options": options}
        config = Config.model_validate({"environment": {"agent": "classes", "classes": [entry]}})
        with pytest.raises(UserError, match=said):
            check_program(config, CHAT)


def test_calls_at_once_are_asked_at_once(playing):
    """All four wait before one is answered, in the opposite order."""
    play = playing("at_once")
    assert play.episode(lambda n: f"{n}{END}", at_once=4, prompt="a") == 6.0
    assert len({text for text in play.read()}) == 1
    assert [each.follows for each in play.asked["3.1"]] == [0] * 6
    assert [each.number for each in play.asked["3.1"]] == [3, 2, 1, 0, 4, 5]


def test_a_call_whose_client_has_gone_is_dropped_unless_it_comes_back(playing, monkeypatch):
    monkeypatch.setattr("rhymeflow.environments.agents.RETRY_SECONDS", 0.2)
    play = playing("loses_patience")
    assert play.episode(lambda n: None if n == 1 and not play.left else f"{n}{END}") == 1.0
    assert play.left == [0]
    assert [each.number for each in play.asked["3.1"]] == [1]


def test_a_client_that_asks_again_gets_the_turn_that_it_asked_for_before(playing, monkeypatch):
    """Also where it is answered later than a call without a client would have been dropped."""
    monkeypatch.setattr("rhymeflow.environments.agents.RETRY_SECONDS", 0.3)

    def slowly(number: int) -> str:
        until = time.monotonic() + 1.0
        while (now := time.monotonic()) < until:
            done = play.agents.poll(now)
            play.agents._finished = [*done, *play.agents._finished]
            play.agents.wait(0.05)
        return f"{number}{END}"

    play = playing("retries")
    assert play.episode(slowly) == 1.0
    assert play.left == []
    assert len(play.asked["3.1"]) == 1


def test_a_stream_is_read_while_it_is_generated(playing):
    """After its first text the program asks something else, which is answered before the rest; a
    character comes when it is whole."""
    pytest.importorskip("openai")
    pytest.importorskip("anthropic")
    play = playing("streams")
    play.begin()
    for name in ("chat", "responses", "messages"):
        called = play.called()
        assert called.is_streamed
        play.grow(called, ids(CHAT, "I say"))
        other = play.called()
        assert not other.is_streamed
        assert f"{name} said I say<|im_end|>" in CHAT.decode(other.tokens)
        play.answer(other, f"so{END}")
        play.grow(called, ids(CHAT, " now"))
        play.grow(called, ids(CHAT, "€")[:1])
        play.answer(called, f"I say now€{END}")
    assert play.end() is None


def test_a_turn_ends_with_a_text_that_the_program_names_and_is_read_without_it(playing):
    """By the official clients, at once and as a stream; the next call continues the whole turn."""
    pytest.importorskip("openai")
    pytest.importorskip("anthropic")
    play = playing("stops")
    said = "I look.\nObservation:"
    play.begin()
    for until in [Until(None, ("\nObs", "Observation:"))] * 4 + [
        Until(None, ("x",), frozenset({7}))
    ]:
        called = play.called()
        limit = called.until.max_tokens
        assert called.until == msgspec.structs.replace(until, max_tokens=limit)
        text = said[: 4 if until.tokens else 11]
        for token in ids(CHAT, text) if called.is_streamed else []:
            play.grow(called, [token])
        play.answer(called, text, reason="stop")
    assert play.end() is None
    assert "look.\nObs<|im_end|>\n<|im_start|>user\nx<|im_end|>" in play.read()[1]


CALL = '<tool_call>{"name": "add"}</tool_call>'
CUT = "incomplete {'reason': 'max_output_tokens'}"
ENDS = {
    "/v1/chat/completions": ["stop", "tool_calls", "length"] * 2,
    "/v1/responses": ["completed None", "completed None", CUT] * 2,
    "/v1/messages": ["end_turn None", "tool_use None", "max_tokens None"] * 2,
    "/inference/v1/generate": ["stop", "stop", "length"],
}


def test_each_dialect_says_how_a_turn_ended(playing):
    play = playing("ends", max_turns=30)
    said = [f"{path} {how}" for path, hows in ENDS.items() for how in hows]
    says = [f"4{END}", f"{CALL}{END}", "4<|im_start|>"]
    assert play.episode(lambda n: says[(n - 1) % 3], ends=said) is None


SAID = ["a", "é", "€", "\ufffd", "<", "<tool_", CALL, CALL[:-1]]


@given(
    st.lists(st.sampled_from([*SAID, END]), max_size=8),
    st.lists(st.integers(0, 9), max_size=12),
    st.booleans(),
    st.lists(st.sampled_from(["aé", "€a", "<t", "<", "l_call>{", "}</", "\ufffd"]), max_size=2),
)
def test_what_is_sent_of_a_turn_begins_its_content_whatever_follows(said, sizes, has_tools, stops):
    tokens, conversations = ids(CHAT, "".join(said)), Conversations(Config(), CHAT)
    if stops:
        found = StopTexts(CHAT.decode, stops)
        tokens = tokens[: next((n for n, t in enumerate(tokens, 1) if found.add(t)), None)]
    asked: dict[str, Any] = {"messages": [user("add")], "tools": [ADD] if has_tools else []}
    asked["stop"] = stops
    call = read("/v1/chat/completions", json.dumps(asked).encode())
    asking, growing = conversations.asking(call, []), conversations.growing(call)
    sent = []
    for size in [*sizes, len(tokens)]:
        part, tokens = tokens[:size], tokens[size:]
        growing.add(part, [-1.0] * len(part))
        sent.append(conversations.begun(call, asking, growing, 0).content)
    if growing.tokens:
        turn, _ = conversations.turn(call, asking, growing, 0, "stop")
        assert all(turn.content.startswith(each) for each in sent)
        text = CHAT.decode(growing.tokens, skip_special_tokens=True)
        assert (turn.stop is not None) == any(each in text for each in stops)
        if not turn.calls:
            assert turn.content == before_stop(text, stops)[0]
            assert not any(each in turn.content for each in stops)


def test_all_text_waits_for_calls_that_begin_with_no_tag_in_it_if_there_are_tools():
    tok = tokenizer(CHATML)
    tok.add_special_tokens({"additional_special_tokens": ["<tool_call>"]})
    for tools, sent in (([ADD], ""), ([], "so")):
        conversations, body = Conversations(Config(), tok), {"messages": [user("add")]}
        call = read("/v1/chat/completions", json.dumps(body | {"tools": tools}).encode())
        asking, growing = conversations.asking(call, []), conversations.growing(call)
        growing.add(ids(tok, "so"), [-1.0] * 2)
        assert conversations.begun(call, asking, growing, 0).content == sent


def test_a_client_that_stops_reading_ends_the_generation_and_has_read_a_turn(playing):
    play = playing("stops_reading")
    play.begin()
    called = play.called()
    play.grow(called, ids(CHAT, "4"))
    begun = time.monotonic()
    assert play.next().result == Left(called.number)
    assert time.monotonic() - begun < 5, "no client asks for the rest"
    again = play.called()
    assert (again.number, again.tokens) == (1, called.tokens)
    play.answer(called, "41")
    play.answer(again, f"2{END}")
    assert play.end() == 42.0


def test_a_stream_ends_with_an_error_if_its_program_does(playing):
    """That is read by what the program has started, if by anyone."""
    play = playing("reads", agent_timeout=1.5)
    play.begin()
    play.grow(play.called(), ids(CHAT, "I say"))
    sent = [call.sent for call in play.agents._programs["3.1"].calls]
    answered: list[bytes] = []
    play.agents._server.answer = lambda number, answer: answered.append(answer.body)
    while (task := play.next()).error is None:
        pass
    assert "took longer than environment.agent_timeout" in task.error
    assert sent[0]
    assert b"event: error\ndata: {" in answered[0]
    assert b"the episode has ended" in answered[0]


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("raise", "raised ValueError: no, thank you"),
        ("raise at once", "raised ValueError: not today"),
        ("exit", "ended with exit code 3 before it returned"),
        ("exit in silence", "ended with exit code 0 before it returned"),
        ("die", "was killed by SIGKILL"),
        ("nothing", "ended without a call that the policy answered"),
        ("flood", "made more calls than environment.max_turns = 4"),
        ("text", "raised ValueError: it returned 'good', should be a finite number or None"),
    ],
)
def test_what_a_program_does_wrong_is_an_error_and_no_reward(playing, does, said):
    play = playing("misbehaves", max_turns=4)
    told = play.episode(lambda n: f"x{END}", does=does)
    assert told.partition("; what it printed is in ")[0] == f"the agent of 3.1 {said}"


def test_a_program_that_kills_its_launcher_ends_the_run_by_name(playing, tmp_path):
    """Whether that is noticed when it says nothing more or when it is told something."""
    play = playing("misbehaves")
    said = rf"the process that starts it ended \(killed by SIGKILL\); .* is in {tmp_path / 'log'}"
    play.begin(does="kill its launcher")
    play.answer(play.called(), f"x{END}")
    with pytest.raises(UserError, match=said):
        play.next()
    with pytest.raises(UserError, match=said):
        play.begin("3.2")


def test_a_program_that_does_not_call_is_given_up(playing):
    play = playing("misbehaves", idle_timeout=0.5)
    said = play.episode(lambda n: f"x{END}", does="hang")
    assert said == "the agent of 3.1 made no call for environment.idle_timeout = 0.5 seconds"


def test_a_program_that_takes_too_long_is_given_up_though_the_policy_is_at_it(playing):
    play = playing("misbehaves", agent_timeout=0.5, idle_timeout=0.4)
    said = play.episode(lambda n: None, does="hang")
    assert said == "the agent of 3.1 took longer than environment.agent_timeout = 0.5 seconds"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"temperature": 0.5}, "the run samples with rollout.temperature = 1"),
        ({"messages": [user("long " * 100)]}, "length is 100 tokens; the prompt has 519"),
        ({"seed": 3}, "run.seed"),
        ({"path": "/embeddings"}, "there is GET /v1/models, and POST to"),
    ],
)
def test_what_is_not_done_is_refused_by_name(playing, how, said):
    """It is no turn: an episode of such calls alone has none."""
    play = playing("misbehaves")
    told = play.episode(lambda n: f"x{END}", does="asks wrongly", how=how, said=said, room=100)
    last = "ended without a call that the policy answered; its last call was refused: "
    assert told.startswith(f"the agent of 3.1 {last}")
    assert said in told


def test_a_command_gets_its_row_and_gives_its_reward_by_a_file(playing, tmp_path):
    play = playing([sys.executable, str(FILE)])
    assert play.episode(lambda n: f"four{END}", prompt="a") == 4.0
    failed = play.episode(lambda n: f"four{END}", key="3.2", prompt="a", fails=True)
    where = f"; what it printed is in {tmp_path / 'log'}"
    assert failed == f"the agent of 3.2 ended with exit code 7{where}"
    for gives, said in (
        ("bytes", "wrote '\ufffd\ufffd"),
        ("directory", "left no file at RHYMEFLOW_R"),
    ):
        assert f"the agent of 3.3 {said}" in play.episode(lambda n: f"x{END}", "3.3", gives=gives)


def test_a_log_that_gets_too_large_begins_anew(playing, tmp_path):
    log, play = tmp_path / "log", playing("one")
    os.truncate(log, 1 << 29)
    assert play.episode(lambda n: f"four{END}", prompt="a") == 4.0
    assert log.read_text() == "What programs had printed was too much, and is gone.\n"


def test_what_a_program_has_started_ends_with_it_and_so_does_what_is_dropped(playing):
    play = playing("misbehaves")

    def become(number):
        until = time.monotonic() + 10
        while len(descendants(play.agents._launcher.pid)) != number:  # the dead count
            assert time.monotonic() < until
            time.sleep(0.02)

    play.episode(lambda n: f"x{END}", does="leaves a child")
    become(0)
    play.begin("9.9", does="hang")
    assert isinstance(play.next().result, Called)
    become(1)
    play.agents.drop(["9.9"])
    become(0)


def test_what_importing_a_program_has_started_goes_on(tmp_path):
    """Whatever it prints then, and each run, is in the log, and nothing that it starts keeps the
    launcher's pipes open."""
    file, log = tmp_path / "agent.py", tmp_path / "log"
    file.write_text(
        "import os, sys\n"
        "from subprocess import Popen\n"
        "print('imported', sys.stdin.read(), flush=True)\n"
        "own = [Popen(['sleep', '60'], start_new_session=each) for each in (False, True)]\n"
        "def agent(base_url, seed):\n"
        "    print('runs')\n"
        "    if os.fork() == 0:\n"
        "        return 'of a fork'\n"
        "    os.wait()\n"
        "    sys.stderr.close()\n"
        "    return seed + sum(os.path.exists(f'/proc/{each.pid}') for each in own)\n"
    )
    command = [sys.executable, launcher.__file__, json.dumps({"call": f"{file}:agent"})]
    pipes = {"stdin": PIPE, "stdout": PIPE, "text": True, "bufsize": 1}
    with log.open("a") as err, Popen(command, stderr=err, start_new_session=True, **pipes) as run:
        try:
            assert json.loads(run.stdout.readline()) == {"failed": None}
            for seed in (10, 20):
                job = {"id": seed, "base_url": f"http://e/{seed}/v1", "row": {}, "seed": seed}
                run.stdin.write(f"{json.dumps(job)}\n")
                assert json.loads(run.stdout.readline()) == {"id": seed, "value": seed + 2.0}
            started = descendants(run.pid)
            os.kill(run.pid, signal.SIGKILL)
            assert run.stdout.readline() == "", "its end is not seen"
            printed = log.read_text()
            assert (printed.count("imported \n"), printed.count("runs\n")) == (1, 2)
        finally:
            for process in started:
                os.kill(process, signal.SIGKILL)


def test_an_episode_whose_program_is_gone_is_lost(playing):
    play = playing("one")
    for wants, turns in (("answer", [[], []]), ("reward", [[]])):
        episode = Episode("4.0", 5, 0, "begin", {}, turns, [])
        play.agents.submit(play.agents.task(episode, wants, 300))
        task = play.next()
        assert task.is_lost
        assert task.error == "the agent of 4.0 was lost with the process that ran it"


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        (f"{FILE}:user", "takes no argument base_url, the address of the policy"),
        (f"{FILE}:nobody", "has no attribute 'nobody'"),
        (f"{FILE}:needs_more", "needs_more takes prompt, and is given base_url, row, seed"),
        (f"{FILE}:Steps", "Steps is a class: environment.classes names it, and agent is 'classes'"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused(tmp_path, agent, said):
    config = Config.model_validate({"environment": {"agent": agent}})
    agents = Agents(config, CHAT, tmp_path / "log", LOOPBACK)
    assert said in refusal(agents.start)
    agents.close()
    with pytest.raises(UserError, match="no chat template"):
        Agents(config, tokenizer(None), tmp_path / "log", LOOPBACK)


def test_the_clients_of_openai_and_anthropic_work_unchanged(playing, monkeypatch):
    """With the base URL that the program is given, or with what is in its environment, and where
    other addresses are reached through a proxy."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "elsewhere.org")
    pytest.importorskip("openai")
    pytest.importorskip("anthropic")
    play = playing("official_clients")
    call = f'I add. <tool_call>{{"name": "add", "arguments": {{"a": 41}}}}</tool_call>{END}'
    assert play.episode(lambda n: f"{n}{END}" if n < 6 else call, prompt="add") == 21.0
    assert len(play.asked["3.1"]) == 8
    follows = [each.follows > 0 for each in play.asked["3.1"]]
    assert follows == [False, True, *[False] * 6]


def test_the_server_is_on_loopback_or_on_its_nodes_address():
    """And nowhere else: a node of a cluster has other networks too."""
    assert objects.address() == LOOPBACK
    with sharing() as shared:
        shared.address = "127.0.0.2"
        server = AgentServer(objects.address())
    port = int(server.address.removeprefix("http://127.0.0.2:"))
    socket.create_connection(("127.0.0.2", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, port))
    server.close()


def test_an_answer_is_sent_at_once_and_with_its_length():
    """Else its body would wait until the client acknowledges its headers, and come in chunks."""
    server = AgentServer(LOOPBACK)
    server.start()
    client = HTTPConnection(server.address.removeprefix("http://"))
    client.request("POST", "/", b"{}")
    assert server.woken.poll(30)
    server.answer(server.arrived[0].number, HttpAnswer(200, b"{}"))
    assert client.getresponse().getheader("content-length") == "2"
    [served] = server._server.server_state.connections
    connection = served.transport.get_extra_info("socket")
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    client.close()
    server.close()
