"""A Ray of several logical nodes on this machine, for all tests of this folder."""

import importlib.util

import pytest


@pytest.fixture(scope="package")
def cluster():
    """A head with room for a learner of two ranks, or for one and an instance."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    from tests.ray.nodes import logical_nodes

    with logical_nodes(2) as nodes:
        yield nodes


@pytest.fixture
def nodes(cluster):
    """The cluster with so many nodes beside its head, of one CPU each."""

    def with_others(count: int):
        while len(cluster.others) > count:
            cluster.kill(cluster.others[0])
        while len(cluster.others) < count:
            cluster.add()
        return cluster

    return with_others
