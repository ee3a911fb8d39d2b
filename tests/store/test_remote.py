"""A store that another process answers for: the same answers and the same errors."""

import sqlite3
from contextlib import closing

import pytest

from rhymeflow.config import Config
from rhymeflow.core.types import TrajectoryId
from rhymeflow.errors import UserError
from rhymeflow.store.damage import open_undamaged
from rhymeflow.store.handle import STORE, RemoteTrajectoryReader, explained, serve, store_reader
from rhymeflow.store.reader import IncompleteBatch, TrajectoryReader
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.refused import refusal
from tests.store.stores import judge, put
from tests.weights.shared_objects import sharing

ON_RAY = Config(runtime="ray")


@pytest.fixture
def shared():
    with sharing() as fake:
        fake.name = STORE
        serve()
        fake.name = "learner"
        yield fake


@pytest.fixture
def path(tmp_path):
    store = SqliteTrajectoryStore(tmp_path / "events.db")
    store.begin_attempt(Config().model_dump_json(), now=0.0, started="now")
    for member in range(2):
        put(store, TrajectoryId(7, member), 0, [1, 2, 3], version=4)
        judge(store, TrajectoryId(7, member), 3, 0.5)
    put(store, TrajectoryId(8, 0), 0, [1])
    store.commit()
    yield store.path
    store.close()


def test_it_answers_as_the_file_does(shared, path):
    here = TrajectoryReader(path)
    there = store_reader(ON_RAY, path.parent)
    assert isinstance(there, RemoteTrajectoryReader)
    statement = "SELECT group_id, member, tokens FROM segments WHERE version = ?"
    assert there.query(statement, 4) == here.query(statement, 4) != []
    assert there.attempts() == here.attempts()
    assert there.batch((7,), ((1, 0),)) == here.batch((7,), ((1, 0),))
    assert isinstance(store_reader(Config(), path.parent), TrajectoryReader)
    here.close()


def test_a_batch_is_read_once_for_all_ranks(shared, path):
    readers = [RemoteTrajectoryReader(STORE, path) for _ in range(2)]
    put_before = shared.num_put
    assert readers[0].batch((7,), ((0, 1),)) == readers[1].batch((7,), ((0, 1),))
    assert shared.num_put == put_before + 1
    assert len(readers[0].batch((7,), ((1,),))) == 1
    assert shared.num_put == put_before + 2


def test_errors_come_through(shared, path):
    reader = RemoteTrajectoryReader(STORE, path)
    with pytest.raises(IncompleteBatch, match="has not finished"):
        reader.batch((8,), ((0,),))
    with pytest.raises(UserError, match="is damaged: trajectory 8"), explained(reader):
        reader.batch((8,), ((0,),))
    with pytest.raises(KeyError), explained(reader):
        raise KeyError("the file is as it should be")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE events SET body = '{'")
    with pytest.raises(UserError, match="is damaged: Input data"), open_undamaged(path) as there:
        list(there.events())
    elsewhere = RemoteTrajectoryReader(STORE, path.with_name("nothing.db"))
    assert "nothing.db" in refusal(elsewhere.attempts)
