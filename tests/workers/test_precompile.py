"""What is compiled beforehand is what a run compiles."""

import gc
from pathlib import Path

import torch

from rhymeflow.config import Config
from rhymeflow.histospec.drafter import rehearse
from rhymeflow.runtime import processes
from rhymeflow.weights.install import Installation
from rhymeflow.weights.manifest import manifest_of
from rhymeflow.weights.shared_memory import SharedMemoryWeightStore
from rhymeflow.workers import precompile
from tests.engine.models import make_engine, make_requests, run
from tests.engine.test_body import model_of
from tests.learner.builders import made_up_batch, tiny_learner, tiny_model


def test_after_it_nothing_is_compiled(tmp_path):
    """In a process that has loaded nothing else; that what was compiled is found by the next one is
    numba's business."""
    processes.prepare()
    found = tmp_path / "found"
    process = processes.context().Process(target=compiled_after, args=(found,))
    process.start()
    process.join()
    assert found.read_text().split() == []


def compiled_after(found: Path) -> None:
    """Write what an engine, weights and a learner use of compiled code that it did not make."""
    precompile.main()
    before = compiled()
    for use in (use_an_engine, use_weights, use_a_learner):
        use()
    found.write_text("\n".join(name for name, _ in compiled() - before))


def compiled() -> set[tuple[str, str]]:
    """Names and types of all compiled functions that this process has made or loaded."""
    from numba.core.dispatcher import Dispatcher  # after it is told where its cache is

    there = (each for each in gc.get_objects() if isinstance(each, Dispatcher))
    return {(each.py_func.__name__, str(types)) for each in there for types in each.overloads}


def use_an_engine() -> None:
    rehearse(Config())
    for kind in ("llama", "qwen3"):
        for dtype in (torch.float32, torch.bfloat16):
            run(make_engine(model_of(kind, dtype)), make_requests([3, 9]))


def use_weights() -> None:
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


def use_a_learner() -> None:
    tiny_learner(model=tiny_model(hidden_size=64)).train(made_up_batch(), 0)  # heads of 16
