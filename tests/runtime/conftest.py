"""Workers of these tests are forked from a process that has loaded torch.

Loading it takes each of them four seconds, which is most of a tiny run. A fork is otherwise like
the processes of a real run: it has its own memory, and what it is given comes through a pipe. What
a worker finds that was started by `spawn`, as real runs start them, is tested in `test_process.py`
and wherever a run is started by the command line.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from types import SimpleNamespace

import pytest

from rhymeflow.runtime import local

LOADED = [
    "rhymeflow.workers.learner",
    "rhymeflow.workers.rollout",
    "rhymeflow.workers.history",
    "rhymeflow.workers.reward",
    "transformers.models.llama.modeling_llama",
]


@pytest.fixture(autouse=True, scope="package")
def workers_that_have_loaded_torch():
    with pytest.MonkeyPatch.context() as patch:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(LOADED)
        patch.setenv("OMP_NUM_THREADS", "1")  # torch's threads, as `tiny_config` has them
        forkserver.ensure_running()
        patch.undo()
        fork = SimpleNamespace(get_context=lambda method: context)
        patch.setattr(local, "multiprocessing", fork)
        yield
