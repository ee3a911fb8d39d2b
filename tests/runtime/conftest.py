"""Workers of these tests are forked from one server, which has loaded all that they run.

What a worker finds that was spawned, as on macOS, is tested in `test_local.py`.
"""

from __future__ import annotations

import pytest

from rhymeflow.runtime import processes

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
        patch.setattr(processes, "PRELOAD", ["rhymeflow.workers.preload", *LOADED])
        processes.prepare()
        yield
