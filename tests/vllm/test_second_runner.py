"""vLLM's second model runner (V2) with drafts, on the CPU: token by token the native engine's.

Its kernels are Triton's, for which vLLM's CPU build has no backend; here Triton interprets them, a
hundred times slower and with the same meaning. So this is V2's own code: its preparing of inputs,
its logits processors and its greedy verification.
"""

import importlib.util
import os
from types import SimpleNamespace

import pytest

from tests.vllm.sameness import compare_with_native, needs_vllm

IS_HERE = importlib.util.find_spec("triton") is not None
pytestmark = [
    needs_vllm,
    pytest.mark.vllm,
    pytest.mark.skipif(not IS_HERE, reason="needs Triton"),
    pytest.mark.timeout(600),
]

NUM_TOKENS = 16


@pytest.fixture(scope="module", autouse=True)
def interpreter():
    """Before vLLM is imported in this process."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends

    backends.clear()
    driver = SimpleNamespace(is_active=lambda: True)
    backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)


def test_same_tokens_as_the_native_engine_with_and_without_drafts():
    options = {"rollout__vllm_model_runner": "v2"}
    vllm = compare_with_native("demo", options, NUM_TOKENS, 0.01)
    runner = vllm._llm._engine.model_executor.driver_worker.worker.model_runner
    assert type(runner).__module__ == "vllm.v1.worker.cpu.model_runner"
