"""vLLM on a GPU: the same tokens as the native engine there, with either runner and drafts."""

import multiprocessing

import pytest
import torch

from tests.vllm.sameness import closing_rig, needs_vllm, same_as_native

pytestmark = [
    needs_vllm,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def check(runner):
    """In a process of its own: two engines of vLLM do not go into one."""
    with closing_rig(
        "demo",
        "float32",
        model__device="cuda",
        rollout__vllm_gpu_memory_utilization="0.3",
        rollout__vllm_model_runner=runner,
    ) as rig:
        vllm, requests = same_as_native(rig, 40)
        assert sum(len(request.tokens) - request.steps for request in requests) > 50
        rig.publish(1, 0.01)
        assert vllm.install(rig.store.handle.open(), 1, keep_cache=False).version == 1
        vllm.close()


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_same_tokens_as_the_native_engine_with_and_without_drafts(runner):
    process = multiprocessing.get_context("spawn").Process(target=check, args=(runner,))
    process.start()
    process.join(600)
    assert process.exitcode == 0
