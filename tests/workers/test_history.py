"""What the history process writes to the index, from stores that grow while it reads."""

import random

import pytest

from rhymeflow.config import Config
from rhymeflow.core.types import TrajectoryId
from rhymeflow.histospec.draft import IndexHandle
from rhymeflow.histospec.noise_sharing import EVALUATION_EPOCH
from rhymeflow.store.follow import Follower
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.writer import SqliteTrajectoryStore
from rhymeflow.workers import history
from rhymeflow.workers.history import IndexWriter
from tests.store.stores import answered, judge, prompt_of, put


class FakeIndex:
    """An index that remembers what it was told."""

    def __init__(self, max_responses: int = 1000) -> None:
        self.handle = IndexHandle("index", 1, 1, max_responses)
        self.begun: list[dict] = []
        self.texts: list[list[int]] = []
        self.rewards: dict[int, float | None] = {}

    def begin(self, prompt, **about):
        self.begun.append({"prompt": prompt, **about})
        self.texts.append([])
        return len(self.texts) - 1

    def extend(self, response, tokens):
        assert response not in self.rewards, "what is finished does not grow"
        self.texts[response] += list(tokens)

    def finish(self, response, reward):
        assert response not in self.rewards
        self.rewards[response] = reward


@pytest.fixture
def store(tmp_path):
    store = SqliteTrajectoryStore(tmp_path / "events.db")
    yield store
    store.close()


@pytest.fixture
def reader(store):
    reader = TrajectoryReader(store.path)
    yield reader
    reader.close()


def index_writer(index, reader, config=None, num_tokens=10**9, **about):
    return IndexWriter(index, Follower(reader, num_tokens=num_tokens), config or Config(), **about)


def test_a_response_is_entered_with_what_drafts_are_chosen_by(store, reader):
    index, config = FakeIndex(), Config(rollout={"num_generations": 4, "rhyming_noise": 0.5})
    writing = index_writer(index, reader, config)
    put(store, TrajectoryId(3, 1), 0, [1, 2], version=6, epoch=2)
    put(store, TrajectoryId(3, 2), 0, [3], version=7, epoch=2)
    put(store, TrajectoryId(3, 1), 2, [4], version=8, epoch=2)
    store.commit()
    assert writing.write() == 3
    assert index.begun == [
        {"prompt": prompt_of(3), "sample": 1, "noise_epoch": 0},
        {"prompt": prompt_of(3), "sample": 2, "noise_epoch": 2},
    ], "half of the members rhyme"
    assert index.texts == [[1, 2, 4], [3]]
    assert index.rewards == {}
    other = FakeIndex()
    index_writer(other, reader, config, aligned=False).write()
    assert [each["noise_epoch"] for each in other.begun] == [-1, -1], "other noise rhymes with none"
    judge(store, TrajectoryId(3, 1), 3, 0.75)
    store.commit()
    writing.write()
    assert index.rewards == {0: 0.75}


def test_the_configuration_of_a_run_that_was_made_numbers_prompts_as_the_one_it_was_made_with():
    given = Config().data
    in_force = given.model_copy(update={"chat_template": True, "size": 9, "eval_size": 3})
    assert history._numbering(in_force) == history._numbering(given)
    other = given.model_copy(update={"source": "other.jsonl"})
    assert history._numbering(other) != history._numbering(given)


def test_a_suites_answers_are_entered_under_the_noise_they_all_have(store, reader):
    index, prompt_ids = FakeIndex(), list(range(20))
    answered(store, -1, [0.5], prompt_tokens=prompt_ids, tokens=[7, 8], version=4)
    store.commit()
    writing = index_writer(index, reader)
    assert (writing.write(), writing.write()) == (1, 0)
    assert index.begun == [{"prompt": prompt_ids, "sample": 0, "noise_epoch": EVALUATION_EPOCH}]
    assert (index.texts, index.rewards) == ([[7, 8]], {0: 0.5})


@pytest.mark.parametrize(
    ("num_tokens", "starts"),
    [(0, []), (1, []), (2, [4]), (4, [4]), (5, [3, 4]), (9, [1, 2, 3, 4]), (10, [0, 1, 2, 3, 4])],
)
def test_it_begins_with_the_last_tokens(store, reader, num_tokens, starts):
    for group, count in enumerate((1, 2, 2, 3, 2)):
        put(store, TrajectoryId(group, 0), 0, [group] * count)
    store.commit()
    found = Follower(reader, num_tokens=num_tokens).segments(9)
    assert [s.trajectory.group for s in found] == starts


def test_what_began_before_the_tail_is_left_out(store, reader):
    index = FakeIndex()
    put(store, TrajectoryId(0, 0), 0, [1, 2])
    put(store, TrajectoryId(1, 0), 0, [3])
    put(store, TrajectoryId(0, 0), 2, [4])
    store.commit()
    index_writer(index, reader, num_tokens=2).write()
    assert index.texts == [[3]]


def test_what_is_never_judged_is_not_remembered_for_ever(store, reader):
    index = FakeIndex(max_responses=3)
    writing = index_writer(index, reader)
    for group in range(8):
        put(store, TrajectoryId(group, 0), 0, [group])
    store.commit()
    writing.write()
    assert len(writing._open) == 3
    judge(store, TrajectoryId(0, 0), 1, 1.0)
    judge(store, TrajectoryId(7, 0), 1, 1.0)
    store.commit()
    writing.write()
    assert index.rewards == {7: 1.0}


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_however_store_and_writer_take_turns_all_of_it_is_written(
    store, reader, monkeypatch, at_once
):
    """Also if the store grows between what the writer reads of it."""
    monkeypatch.setattr(history, "SEGMENTS_AT_ONCE", at_once)
    chance, index = random.Random(at_once), FakeIndex()
    tail = Follower(reader, num_tokens=10**9)
    writing, read = IndexWriter(index, tail, Config()), tail.segments
    lengths = {TrajectoryId(group, member): 0 for group in range(4) for member in range(3)}

    def grow():
        trajectory = chance.choice(list(lengths))
        if lengths[trajectory] < 10:
            put(store, trajectory, lengths[trajectory], [lengths[trajectory]] * 2)
            lengths[trajectory] += 2
            if lengths[trajectory] == 10:
                judge(store, trajectory, 10, float(trajectory.group))

    def read_and_grow(limit):
        found = read(limit)
        for _ in range(chance.randrange(4)):
            grow()
        store.commit()
        return found

    tail.segments = read_and_grow
    for _ in range(300):
        grow()
        if chance.random() < 0.3:
            store.commit()
        if chance.random() < 0.3:
            writing.write()
    while writing.write():
        pass
    assert index.texts == [[n // 2 * 2 for n in range(10)]] * len(lengths)
    prompts = [prompt_of(group) for group in range(4)]
    rewards = {n: float(prompts.index(about["prompt"])) for n, about in enumerate(index.begun)}
    assert index.rewards == rewards
