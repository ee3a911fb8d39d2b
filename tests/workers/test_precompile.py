"""What is compiled beforehand is what a run compiles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LISTENING = """
from numba.core import event
compiled = []
class Listener(event.Listener):
    def on_start(self, each): compiled.append(each.data["dispatcher"].py_func.__name__)
    def on_end(self, each): pass
event.register("numba:compile", Listener())
"""


def compiled_after(first: str, code: str, **environment: str) -> list[str]:
    """What is compiled by this code after a function of `precompile`."""
    before = f"from rhymeflow.workers import precompile\nprecompile.{first}()"
    done = subprocess.run(
        [sys.executable, "-c", f"{before}\n{LISTENING}\n{code}\nprint(*compiled)"],
        capture_output=True, text=True, check=True, env=os.environ | environment,
    )  # fmt: skip
    return done.stdout.split()


ENGINE = """
import torch
from rhymeflow.config import Config
from rhymeflow.histospec.drafter import rehearse
from rhymeflow.weights.shared_memory import SharedMemoryWeightStore
from rhymeflow.weights.install import Installation
from rhymeflow.weights.manifest import manifest_of
from tests.engine.models import make_engine, make_requests, run
from tests.engine.test_body import model_of
rehearse(Config())
for kind in ("llama", "qwen3"):
    for dtype in (torch.float32, torch.bfloat16):
        engine = make_engine(model_of(kind, dtype))
        run(engine, make_requests([3, 9]))
weights = {"w": torch.zeros(2_000_000, dtype=torch.bfloat16)}
store = SharedMemoryWeightStore(manifest_of(weights), keep=2)
store.publish(0, weights)
installed, reader = Installation({"w": torch.ones_like(weights["w"])}), store.handle.open()
installed.pull(reader)
weights["w"][7] = 1
store.publish(1, weights)
assert reader.update(installed.holds, 1).steps
installed.pull(reader)
store.close()
"""


def test_after_it_nothing_is_compiled() -> None:
    """In one process; that what was compiled is found by the next is numba's business."""
    assert compiled_after("main", ENGINE) == []


LEARNER = """
from tests.learner.builders import made_up_batch, tiny_learner, tiny_model
tiny_learner(model=tiny_model(hidden_size=64)).train(made_up_batch(), 0)  # heads of 16
"""


@pytest.mark.slow
def test_after_it_a_learner_compiles_nothing(tmp_path: Path) -> None:
    """With nothing on the disk from before, so that all it runs must be compiled here."""
    assert compiled_after("compile_learner", LEARNER, NUMBA_CACHE_DIR=str(tmp_path)) == []
