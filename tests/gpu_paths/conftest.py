"""The simulated device. What needs a backward pass needs a compiler, and is skipped without one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu_paths.fake_cuda import HAS_COMPILER, compiled, fake_cuda
from tests.gpu_paths.simcuda import SimCuda, simulated_cuda

collect_ignore_glob = ["test_*.py"] if torch.backends.cuda.is_built() else []
"""A CPU build is needed: there the tests marked `gpu` need no simulation."""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent  # of all processes
    return compiled(directory) if HAS_COMPILER else None


@pytest.fixture
def sim(library: Path | None) -> Iterator[SimCuda]:
    with simulated_cuda(library) as sim:
        yield sim


@pytest.fixture(autouse=True)
def gpu(request: pytest.FixtureRequest) -> None:
    """Of tests marked `gpu`, that of `tests/conftest.py`."""
    if request.node.get_closest_marker("gpu"):
        request.getfixturevalue("sim")


@pytest.fixture
def fake(library: Path | None) -> Iterator[None]:
    """For `FakeTensorMode`."""
    with fake_cuda(library):
        yield


@pytest.fixture
def autograd(library: Path | None) -> None:
    """Of a test with a backward pass."""
    if library is None:
        pytest.skip("needs g++")
