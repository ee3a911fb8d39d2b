"""An instance, in this process: commands in, messages out, over a real connection."""

from __future__ import annotations

import fcntl
import multiprocessing
import random
import threading
import time
from collections import defaultdict
from contextlib import closing
from functools import partial

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from rhymeflow.config import DraftingConfig
from rhymeflow.core import events
from rhymeflow.core.commands import Interrupt, Pull, Route
from rhymeflow.core.types import TrajectoryId
from rhymeflow.environments.episode import Until
from rhymeflow.histospec.draft import IndexHandle
from rhymeflow.histospec.index import Index
from rhymeflow.models.tokenizer import load_tokenizer
from rhymeflow.utils.gpu_turn import GpuTurn
from rhymeflow.weights.manifest import manifest_of
from rhymeflow.weights.objects import ObjectWeightStore
from rhymeflow.weights.shared_memory import SharedMemoryWeightStore
from rhymeflow.workers import messages, rollout
from rhymeflow.workers.messages import receive, send
from rhymeflow.workers.rollout import make_engine
from tests.runtime.tiny import tiny_config
from tests.weights.shared_objects import sharing

PROMPTS = ([2, 3, 12, 5], [4, 12, 4], [9, 8, 7, 6, 12, 2])
IDS = [TrajectoryId(group, member) for group in range(len(PROMPTS)) for member in range(3)]


@pytest.fixture
def config(tmp_path):
    return tiny_config(tmp_path, rollout={"max_num_seqs": 4, "max_completion_length": 40})


@pytest.fixture
def weights(config):
    return dict(AutoModelForCausalLM.from_pretrained(config.model.name).named_parameters())


@pytest.fixture
def parameters(weights):
    store = SharedMemoryWeightStore(manifest_of(weights))
    store.publish(0, weights)
    yield store
    store.close()


class Side:
    """The controller's side of one instance: what it was told and what it said."""

    def __init__(
        self, name, config, parameters, monkeypatch, never_stops=False, before=(), turn=None
    ):
        monkeypatch.setattr(rollout, "STATUS_SECONDS", 0.0)  # in every turn
        self.ours, theirs = multiprocessing.Pipe()
        for message in (*before, messages.ConnectWeights(parameters.handle)):
            send(self.ours, message)
        self.instance = rollout.RolloutInstance(theirs, name, config, make_engine, turn)
        assert isinstance(receive(self.ours), events.InstanceJoined)
        if never_stops:
            self.instance.stop_tokens = frozenset()
        self.number = 0

    def tell(self, kind, *values, data=None):
        self.number += 1
        command = kind("rollout-0", self.number, *values)
        send(self.ours, command if data is None else messages.Envelope(command, data))

    def produce(self, trajectory, tokens=()):
        prompt = trajectory.group
        data = messages.Continuation(prompt, 0, list(PROMPTS[prompt]), list(tokens))
        self.tell(Route, trajectory, 0, data=data)

    def turns(self, count):
        """Run some turns; return what was said."""
        heard = []
        for _ in range(count):
            self.instance.turn()
            while self.ours.poll():
                heard.append(receive(self.ours))
        return heard


class Store:
    """What the trajectory store would hold."""

    def __init__(self):
        self.tokens, self.logprobs = defaultdict(list), defaultdict(list)
        self.versions, self.done = defaultdict(list), {}
        self.statuses, self.halted, self.pulled = [], [], []

    def take(self, heard):
        for message in heard:
            match message:
                case messages.TokensGenerated():
                    for part in message.parts:
                        key = part.trajectory
                        assert part.start == len(self.tokens[key]), "parts follow one another"
                        assert len(part.tokens) == len(part.logprobs) > 0
                        self.tokens[key] += part.tokens
                        self.logprobs[key] += part.logprobs
                        self.versions[key] += [part.version] * len(part.tokens)
                case events.TrajectoryFinished():
                    assert message.length == len(self.tokens[message.trajectory])
                    assert message.trajectory not in self.done
                    self.done[message.trajectory] = message.reason
                case events.TrajectoryInterrupted():
                    assert message.length == len(self.tokens[message.trajectory])
                    self.halted.append((message.number, message.trajectory))
                case messages.Envelope(events.Snapshot() as snapshot, status):
                    self.statuses.append(snapshot)
                    self.totals = status
                case messages.Envelope(events.Pulled() as pulled, _):
                    self.pulled.append((pulled.number, pulled.version))
                case _:
                    raise AssertionError(message)
        return self


def undisturbed(config, parameters, monkeypatch):
    side, store = Side("rollout-0", config, parameters, monkeypatch), Store()
    for trajectory in IDS:
        side.produce(trajectory)
    while len(store.done) < len(IDS):
        store.take(side.turns(1))
    return store


def test_moved_between_instances_any_number_of_times(config, parameters, monkeypatch):
    """Law 3, over the wire: what moves is the tokens that the controller has been sent."""
    expected = undisturbed(config, parameters, monkeypatch)
    assert len({len(tokens) for tokens in expected.tokens.values()}) > 3, "not ragged"
    sides = [Side(f"rollout-{i}", config, parameters, monkeypatch) for i in range(2)]
    for seed in range(6):
        chance, store = random.Random(seed), Store()
        at = dict.fromkeys(IDS, 0)
        for trajectory in IDS:
            sides[0].produce(trajectory)
        while len(store.done) < len(IDS):
            moving = [t for t in IDS if t not in store.done and chance.random() < 0.4]
            for origin, side in enumerate(sides):
                side.tell(Interrupt, tuple(t for t in moving if at[t] == origin))
                # Those that finish before they hear of it are passed over.
                heard = side.turns(1)
                store.take(heard)
                for message in heard:
                    if isinstance(message, events.TrajectoryInterrupted):
                        at[message.trajectory] = 1 - origin
                        tokens = store.tokens[message.trajectory]
                        sides[1 - origin].produce(message.trajectory, tokens)
                store.take(side.turns(chance.randrange(4)))
        assert store.done == expected.done
        assert store.tokens == expected.tokens
        for trajectory in IDS:
            assert store.logprobs[trajectory] == pytest.approx(
                expected.logprobs[trajectory], abs=1e-5
            )
        assert len(store.halted) > 10


class AgentCalls:
    """One response's calls, by their noise: what was said, on whichever instance."""

    def __init__(self, order, texts=()):
        self.said, self.order = {noise: [] for noise in order}, order
        self.ended, self.most, self.is_over = [], 0, False
        self.texts, self.reasons = dict(texts), {}

    def call(self, noise):
        prompt = PROMPTS[noise % 2]
        branch, tokens = self.order.index(noise), [*prompt[3:], *self.said[noise]]
        about = {
            "turn": 2,
            "turn_start": len(prompt) - 3,
            "until": Until(12, self.texts.get(noise, ())),
        }
        return messages.Continuation(0, 0, prompt[:3], tokens, branch=branch, noise=noise, **about)

    def begin(self, side):
        first, *others = [each for each in self.order if each not in self.ended]
        side.tell(Route, IDS[0], 0, data=self.call(first))
        for noise in others:
            send(side.ours, messages.AskPolicy(IDS[0], self.call(noise)))

    def take(self, heard):
        interrupted = 0
        for message in heard:
            assert not self.is_over or isinstance(message, messages.Envelope)
            match message:
                case messages.TokensGenerated():
                    for part in message.parts:
                        said = self.said[self.order[part.branch]]
                        assert (part.trajectory, part.start) == (IDS[0], len(said))
                        said += part.tokens
                case messages.CallEnded(branch=branch, reason=reason):
                    self.ended.append(self.order[branch])
                    self.reasons[self.order[branch]] = reason
                case events.TurnEnded(turn=turn):
                    assert turn == 2
                    self.is_over = True
                case events.TrajectoryInterrupted():
                    interrupted += 1
                case messages.Envelope(events.Snapshot(), status):
                    self.most = max(self.most, status.running)
        return interrupted


def test_an_agents_calls_are_answered_at_once_and_what_is_said_does_not_depend_on_their_order(
    config, parameters, monkeypatch
):
    """Law 3, as above: moved meanwhile, all together. A call can join, and be dropped."""
    config = config.changed(environment={"agent": "a.py:f"})
    side = Side("rollout-0", config, parameters, monkeypatch, never_stops=True)
    straight = AgentCalls([0, 1, 2, 4])
    straight.begin(side)
    iterations = 0
    while not straight.is_over:
        straight.take(side.turns(1))
        iterations += 1
    assert straight.most == 4
    assert iterations <= 12 + 3, "as many as one turn of 12 tokens takes, and its prompt"
    assert {len(said) for said in straight.said.values()} == {12}
    assert len({tuple(said) for said in straight.said.values()}) == 4

    other = Side("rollout-0", config, parameters, monkeypatch, never_stops=True)
    moved = AgentCalls([2, 0, 3, 4, 1])
    moved.begin(side)
    moved.take(side.turns(4))
    side.tell(Interrupt, (IDS[0],))
    assert moved.take(side.turns(1)) == 1
    moved.begin(other)
    moved.take(other.turns(1))
    send(other.ours, messages.DropCall(IDS[0], 2))
    while not moved.is_over:
        moved.take(other.turns(1))
    assert sorted(moved.ended) == [0, 1, 2, 4]
    assert len(moved.said.pop(3)) < 12
    assert moved.said == straight.said
    send(other.ours, messages.AskPolicy(IDS[0], moved.call(0)))  # too late: it is routed again
    other.turns(2)
    assert not other.instance.engine.has_work

    decode = partial(load_tokenizer(config.model).decode, skip_special_tokens=True)
    texts = {n: (decode(straight.said[n][5:7]), "none of this") for n in (0, 1)}
    stopped = AgentCalls([0, 1, 2], texts)
    for at in (side, other) * 3:
        stopped.begin(at)
        stopped.take(at.turns(2))
        at.tell(Interrupt, (IDS[0],))
        stopped.take(at.turns(1))
    stopped.begin(side)
    while not stopped.is_over:
        stopped.take(side.turns(1))
    for noise, said in stopped.said.items():
        whole, (text, _) = straight.said[noise], texts.get(noise, ("", ""))
        assert said == whole[: end_of(whole, decode, text)]
    assert stopped.reasons == {0: "stop", 1: "stop", 2: "length"}


def end_of(said, decode, text):
    """The number of tokens by which a text is said."""
    ends = (n for n in range(1, len(said) + 1) if text and text in decode(said[:n]))
    return next(ends, len(said))


def test_a_response_ends_with_the_token_by_which_its_text_has_a_stop(
    config, parameters, monkeypatch
):
    """Also where it was moved to another instance in the middle of that text."""
    expected = undisturbed(config, parameters, monkeypatch)
    decode = partial(load_tokenizer(config.model).decode, skip_special_tokens=True)
    text = decode(expected.tokens[IDS[0]][4:6])
    limited = config.changed(rollout={"stop": ("none of this", text)})
    side, store = Side("rollout-0", limited, parameters, monkeypatch), Store()
    for number, trajectory in enumerate(IDS):
        begun = expected.tokens[trajectory][: 5 if number < 2 else 0]
        store.tokens[trajectory] += begun
        side.produce(trajectory, begun)
    while len(store.done) < len(IDS):
        store.take(side.turns(1))
    for each, whole in expected.tokens.items():
        end = end_of(whole, decode, text)
        assert store.tokens[each] == whole[:end]
        assert store.done[each] == ("stop" if end < len(whole) else expected.done[each])
    assert len(store.tokens[IDS[0]]) <= 6


def test_a_text_ends_a_turn_that_went_on_under_new_weights(
    config, weights, parameters, monkeypatch
):
    """Also one that was half said under the old ones."""
    config = config.changed(environment={"agent": "a.py:f"})
    sides = [Side(f"rollout-{n}", config, parameters, monkeypatch, True) for n in range(2)]
    weights["model.norm.weight"].data[0] += 1
    parameters.publish(1, weights)
    whole, stopped = AgentCalls([0, 1]), AgentCalls([0, 1])
    decode = partial(load_tokenizer(config.model).decode, skip_special_tokens=True)
    for side, calls in zip(sides, (whole, stopped), strict=True):
        calls.begin(side)
        calls.take(side.turns(4))
        at = len(calls.said[0])
        side.tell(Pull, 1)
        while not calls.is_over:
            calls.take(side.turns(1))
        assert side.instance.engine.version == 1
        places = slice(at - 1, at + 1), slice(at + 2, at + 4)
        texts = [decode(whole.said[n][place]) for n, place in enumerate(places)]
        stopped.texts = {n: (text,) for n, text in enumerate(texts)}
    ends = [end_of(whole.said[n], decode, text) for n, text in enumerate(texts)]
    assert ends == [at + 1, at + 4]
    assert [stopped.said[n] for n in (0, 1)] == [whole.said[n][:end] for n, end in enumerate(ends)]
    assert stopped.reasons == {0: "stop", 1: "stop"}


def test_an_index_takes_the_place_of_another(config, parameters, monkeypatch):
    """While responses run: the history worker was lost, and its successor made a new one."""
    expected = undisturbed(config, parameters, monkeypatch)
    drafts = config.model_copy(update={"drafting": DraftingConfig(window="aimd")})
    side, store, steps = Side("rollout-0", drafts, parameters, monkeypatch), Store(), []
    for trajectory in IDS:
        side.produce(trajectory)
    lost = IndexHandle("rf-nobody-has-this", 1, 1, 1)  # its worker is gone
    send(side.ours, messages.UseDrafter(lost))
    for _ in range(3):
        with closing(Index(max_tokens=1000, max_responses=10, shared=True)) as index:
            send(side.ours, messages.UseDrafter(index.handle))
            store.take(side.turns(4))
            steps.append(store.totals.drafts.steps)
    while len(store.done) < len(IDS):
        store.take(side.turns(1))
    assert 0 < steps[0] < steps[1] < steps[2] < store.totals.drafts.steps, "totals go on"
    assert store.tokens == expected.tokens


def test_decoding_goes_on_while_a_pull_is_fetched_and_later_commands_wait(
    config, weights, monkeypatch
):
    """What comes after the pull is generated under the new weights, as the coordinator counts."""
    store = SharedMemoryWeightStore(manifest_of(weights), keep=2)
    store.publish(0, weights)
    side, heard = Side("rollout-0", config, store, monkeypatch, True), Store()
    side.produce(IDS[0])
    heard.take(side.turns(2))
    weights["model.norm.weight"].data[0] += 1
    store.publish(1, weights)
    reader = side.instance.weights
    asked, prepare = [], reader.prepare

    def slow(have, want):
        asked.append((have.version, want))
        is_ready = prepare(have, want)
        return is_ready and len(asked) > 3

    monkeypatch.setattr(reader, "prepare", slow)
    side.tell(Pull, 1)
    side.produce(IDS[3])
    heard.take(side.turns(3))
    assert asked == [(0, 1)] * 3
    assert (heard.pulled, heard.statuses[-1].number) == ([], 1), "nothing says that it is done"
    assert heard.versions == {IDS[0]: [0] * 5}
    while not heard.pulled:
        heard.take(side.turns(1))
    heard.take(side.turns(2))
    assert set(heard.versions[IDS[3]]) == {1}
    assert heard.versions[IDS[0]][-2:] == [1, 1]
    store.close()


def test_a_pull_whose_weights_were_lost_waits_for_the_next_learner(config, weights, monkeypatch):
    """What is decoded goes on under the old weights, and later commands wait, but for that news."""
    with sharing() as shared:
        lost = ObjectWeightStore(manifest_of(weights), keep=2)
        lost.publish(0, weights)
        side, heard = Side("rollout-0", config, lost, monkeypatch, True), Store()
        side.produce(IDS[0])
        heard.take(side.turns(2))
        weights["model.norm.weight"].data[0] += 1
        shared.lost.add("learner")
        side.tell(Pull, 1)
        side.produce(IDS[3])
        time.sleep(0.05)  # what is to fetch the weights has found that nobody is there
        heard.take(side.turns(6))
        assert (heard.pulled, heard.statuses[-1].number) == ([], 1)
        assert set(heard.versions[IDS[0]]) == {0}
        assert len(heard.versions[IDS[0]]) >= 6
        assert IDS[3] not in heard.versions
        shared.name = "learner.1"
        store = ObjectWeightStore(manifest_of(weights), keep=2)
        checksum = store.publish(1, weights)
        send(side.ours, messages.ConnectWeights(store.handle))
        while not heard.pulled:
            heard.take(side.turns(1))
        assert side.instance.engine.checksum == checksum
        heard.take(side.turns(3))
        assert set(heard.versions[IDS[3]]) == {1}
        assert heard.versions[IDS[0]][-2:] == [1, 1]
        side.instance.engine.close()


def test_a_learner_that_is_lost_while_an_instance_starts_is_waited_for(
    config, parameters, monkeypatch
):
    """What was sent after its weights is carried out under those of the next one."""
    gone = messages.ConnectWeights(msgspec.structs.replace(parameters.handle, name="gone"))
    drafter = messages.UseDrafter(IndexHandle("gone", 1, 1, 1))
    side = Side("rollout-0", config, parameters, monkeypatch, before=(gone, drafter))
    side.turns(1)
    assert not side.instance._later
    side.instance.engine.close()
    with pytest.raises(EOFError):
        Side("rollout-0", config, parameters, monkeypatch, before=(gone, messages.Shutdown()))


@pytest.mark.parametrize("kept", ["recompute", "keep"])
def test_a_pull_ends_the_segment_and_keeps_what_runs(
    tmp_path, config, weights, parameters, monkeypatch, kept
):
    config = tiny_config(
        tmp_path, rollout={"max_num_seqs": 4, "max_completion_length": 40, "kv_cache_on_pull": kept}
    )
    side, store = Side("rollout-0", config, parameters, monkeypatch, True), Store()
    for trajectory in IDS[::3]:
        side.produce(trajectory)
    store.take(side.turns(4))
    cached = store.statuses[-1].kv_tokens
    torch.manual_seed(1)
    with torch.no_grad():
        for tensor in weights.values():
            tensor += 0.05 * torch.randn_like(tensor)
    parameters.publish(1, weights)
    # Two turns without a status: their tokens are handed over by the pull, as of version 0.
    monkeypatch.setattr(rollout, "STATUS_SECONDS", 3600.0)
    assert side.turns(2) == []
    monkeypatch.setattr(rollout, "STATUS_SECONDS", 0.0)
    side.tell(Pull, 1)
    rows, body = [], side.instance.engine._body
    plain = body.run
    monkeypatch.setattr(body, "run", lambda ids, *more: rows.append(len(ids)) or plain(ids, *more))
    store.take(side.turns(1))
    assert store.pulled == [(4, 1)]
    assert rows == [3] if kept == "keep" else rows[0] > cached
    for trajectory in IDS[::3]:
        assert store.versions[trajectory] == [0] * 6 + [1]


def test_an_instance_that_pulls_is_not_idle(config, weights, parameters, monkeypatch):
    side = Side("rollout-0", config, parameters, monkeypatch, True)
    install = side.instance.engine.install

    def slowly(*what, **how):
        time.sleep(0.05)
        return install(*what, **how)

    monkeypatch.setattr(side.instance.engine, "install", slowly)
    parameters.publish(1, weights)
    side.tell(Pull, 1)
    side.turns(1)
    assert side.instance.busy_seconds >= 0.05


def test_a_pull_that_an_earlier_one_went_beyond_does_not_go_back(
    config, weights, parameters, monkeypatch
):
    """The coordinator routes by the newest version that was reported: law 1 was broken so."""
    side, store = Side("rollout-0", config, parameters, monkeypatch), Store()
    for version in (1, 2, 3):
        parameters.publish(version, weights)
    side.tell(Pull, 1)
    store.take(side.turns(2))
    assert store.pulled == [(1, 3)], "what was asked for was gone"
    side.tell(Pull, 2)
    store.take(side.turns(2))
    assert store.pulled == [(1, 3), (2, 3)], "though version 2 is still to be had"
    assert side.instance.engine.version == 3
    side.produce(IDS[0])
    while not store.done:
        store.take(side.turns(1))
    assert set(store.versions[IDS[0]]) == {3}


def test_an_engine_sleeps_while_the_learner_wants_the_gpu_and_it_has_no_work(
    config, parameters, weights, monkeypatch, tmp_path
):
    side = Side(
        "rollout-0", config, parameters, monkeypatch, turn=GpuTurn(tmp_path, is_learner=False)
    )
    engine, learner, said = side.instance.engine, GpuTurn(tmp_path, is_learner=True), []
    for name in ("sleep", "wake", "submit", "install"):
        whole = getattr(engine, name, lambda: None)  # of vLLM's engine alone

        def noted(*given, name=name, whole=whole, **named):
            said.append(name)
            return whole(*given, **named)

        monkeypatch.setattr(engine, name, noted, raising=False)
    side.produce(IDS[0])
    side.turns(3)
    wanted = learner._wanted
    wanted.touch()
    while engine.has_work:
        assert said == ["submit"], "it has work"
        side.turns(1)
    side.turns(2)
    assert said == ["submit", "sleep"]
    learner.take()  # it is free
    wanted.unlink()
    parameters.publish(1, weights)
    side.tell(Pull, 1)
    threading.Timer(0.2, learner.give).start()
    side.turns(2)
    assert said == ["submit", "sleep", "wake", "install"]
    with pytest.raises(BlockingIOError):
        fcntl.flock(learner._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    wanted.touch()
    side.turns(2)
    wanted.unlink()
    side.produce(IDS[1])
    side.turns(1)
    assert said[4:] == ["sleep", "wake", "submit"]
