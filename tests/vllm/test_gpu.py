"""vLLM on a GPU: the same tokens as the native engine there, with either runner and drafts."""

import pytest
import torch

from tests.vllm.sameness import compare_with_native, in_a_process, needs_vllm

pytestmark = [
    needs_vllm,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_same_tokens_as_the_native_engine_with_and_without_drafts(runner):
    options = {
        "model__device": "cuda",
        "rollout__vllm_gpu_memory_utilization": "0.3",
        "rollout__vllm_model_runner": runner,
    }
    in_a_process(compare_with_native, "demo", options, 40, 0.01)
