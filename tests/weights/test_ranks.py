"""Weights that several ranks publish, each its rows: those that one rank publishes, or none."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rhymeflow.learner.ranks import Ranks
from rhymeflow.utils import objects as shared
from rhymeflow.weights.base import RankedWeightHandle, VersionUnavailable
from rhymeflow.weights.install import Installation
from rhymeflow.weights.manifest import manifest_of
from rhymeflow.weights.objects import ObjectWeightStore
from rhymeflow.weights.proof import ChecksumMismatch
from rhymeflow.weights.shared_memory import SharedMemoryWeightStore
from tests.weights.made_up import bits, checksum_of, weights
from tests.weights.shared_objects import sharing

COUNT = 3


class ThreadRanks(Ranks):
    """A rank in a thread; `table` has what each gave."""

    def __init__(self, rank, table, barrier):
        super().__init__(rank, COUNT)
        self._table, self.barrier = table, barrier

    def gathered(self, value):
        return self._all(value) if self.is_lead else self._all(value)[:0]

    def summed(self, values):
        return sum(self._all(values))

    def _all(self, value):
        self._table[self.rank] = value
        self.barrier.wait()
        found = [self._table[rank] for rank in range(self.count)]
        self.barrier.wait()
        return found


class Learner:
    """Ranks and their stores."""

    def __init__(self, kind, tensors, keep, objects):
        table, barrier = {}, threading.Barrier(COUNT, timeout=20)
        self.ranks = [ThreadRanks(rank, table, barrier) for rank in range(COUNT)]
        self.stores = []
        for ranks in self.ranks:
            mine = copy.copy(objects)  # what is offered is shared
            mine.name = f"rank {ranks.rank}"
            shared.use(mine)
            made = SharedMemoryWeightStore if kind == "shared memory" else ObjectWeightStore
            self.stores.append(made(manifest_of(tensors), keep=keep, ranks=ranks))
        handles = tuple(store.handle for store in self.stores)
        self.handle = RankedWeightHandle(manifest_of(tensors), handles)

    def publish(self, version, tensors):
        """Publish on all ranks; return what each returned or raised."""

        def publish(ranks):
            rows = {name: each[ranks.rows(len(each))] for name, each in tensors.items()}
            try:
                return self.stores[ranks.rank].publish(version, rows)
            except (RankLost, threading.BrokenBarrierError) as error:
                ranks.barrier.abort()
                return error

        with ThreadPoolExecutor(COUNT) as threads:
            return list(threads.map(publish, self.ranks))


class RankLost(Exception):  # noqa: N818 - it is what happened
    """The rank is gone."""


def made_up(version):
    """Of `few` a rank has no rows; of `half` all changes are of one rank's rows, of `spread` each
    rank has some."""
    more = {"few": torch.full((2, 3), float(version)), "half": torch.zeros(300, 40).bfloat16()}
    more["half"][110:150] = float(version)
    more["spread"] = torch.zeros(301, 700).bfloat16()
    more["spread"][::50, 3] = float(version)
    return {**weights(version), **more}


@pytest.fixture(params=["shared memory", "objects"])
def learner(request):
    with sharing() as objects:
        learner = Learner(request.param, made_up(0), 3, objects)
        learner.publish(0, made_up(0))
        yield learner
        for store in learner.stores:
            store.close()


def test_readers_find_what_one_rank_would_publish(learner):
    into = {name: torch.zeros_like(each) for name, each in made_up(0).items()}
    reader, installed = learner.handle.open(), Installation(into)
    for version in (0, 1, 2, 5, 6):
        if version:
            expected = checksum_of(made_up(version))
            assert learner.publish(version, made_up(version)) == [expected] * COUNT
        while not reader.prepare(installed.holds, version):
            pass
        update = reader.update(installed.holds, version)
        assert bool(update.steps) == (version > 0)
        pulled = installed.pull(reader, version)
        assert pulled == (version, checksum_of(made_up(version)))
        assert bits(into) == bits(made_up(version))
    assert {name for name, *_ in update.listed} == {"embed.weight", "spread"}
    assert [(name, len(rows)) for name, rows in update.whole] == [("few", 2), ("half", 1)]
    metrics = [dict(store.metrics) for store in learner.stores]
    assert metrics[0] == metrics[1] == metrics[2]
    assert 0 < metrics[0]["params/changed_share"] < metrics[0]["params/whole_share"] < 0.02


def test_ranks_copy_their_own_rows_alone(learner):
    sizes = [sum(spec.num_bytes for spec in store.handle.manifest) for store in learner.stores]
    assert sum(sizes) == sum(spec.num_bytes for spec in learner.handle.manifest)
    assert max(sizes) < sum(sizes) / COUNT * 1.02


@pytest.mark.parametrize("when", ["copies", "publishes"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_is_lost_leaves_the_version_before(learner, when, rank, monkeypatch):
    def lose(*_):
        raise RankLost

    monkeypatch.setattr(learner.stores[rank], "_copy" if when == "copies" else "_end", lose)
    assert isinstance(learner.publish(1, made_up(1))[rank], RankLost)
    for want in (None, 0):
        into = {name: torch.zeros_like(each) for name, each in made_up(0).items()}
        assert Installation(into).pull(learner.handle.open(), want).version == 0
        assert bits(into) == bits(made_up(0))
    with pytest.raises(VersionUnavailable):
        Installation(into).pull_part(learner.handle.open(), 1)


def test_rows_of_a_rank_that_are_others_are_noticed(learner):
    other = {name: each + 1 for name, each in made_up(1).items()}
    learner.stores[2]._copy = spoiled(learner.stores[2]._copy)
    learner.publish(1, other)
    into = {name: torch.zeros_like(each) for name, each in other.items()}
    with pytest.raises(ChecksumMismatch, match=r"first embed\.weight"):
        Installation(into).pull(learner.handle.open(), 1)


def spoiled(copy_rows):
    def copied(tensor, first, into):
        found = copy_rows(tensor, first, into)
        into[:1] ^= 1
        return found

    return copied
