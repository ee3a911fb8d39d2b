"""The simulated device, which needs a compiler: without one these tests are skipped."""

import os
import shutil

import pytest
import torch

from tests.gpu_paths.fake_cuda import compiled, fake_cuda
from tests.gpu_paths.simcuda import simulated_cuda

collect_ignore_glob = ["test_*.py"] if torch.backends.cuda.is_built() else []
"""A CPU build is needed: there the tests marked `gpu` need no simulation."""


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent  # of all processes
    return compiled(directory)


@pytest.fixture
def sim(library):
    with simulated_cuda(library) as sim:
        yield sim


@pytest.fixture(autouse=True)
def gpu(request):
    """Of tests marked `gpu`, that of `tests/conftest.py`."""
    if request.node.get_closest_marker("gpu"):
        request.getfixturevalue("sim")


@pytest.fixture
def fake(library):
    """For `FakeTensorMode`."""
    with fake_cuda(library):
        yield
