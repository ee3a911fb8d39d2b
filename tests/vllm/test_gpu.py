"""vLLM on a GPU: the same tokens as the native engine there, with the first runner and drafts."""

import pytest
import torch

from tests.vllm.sameness import closing_rig, needs_vllm, same_as_native

pytestmark = [
    needs_vllm,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_same_tokens_as_the_native_engine_with_and_without_drafts():
    with closing_rig(
        "demo", "float32", model__device="cuda", rollout__vllm_gpu_memory_utilization="0.3"
    ) as rig:
        vllm, _ = same_as_native(rig, 40)
        rig.publish(1, 0.01)
        assert vllm.install(rig.store.handle.open(), 1, keep_cache=False).version == 1
        vllm.close()
