"""vLLM with SmolLM2-135M in float32: token by token what the native engine generates."""

import pytest

from tests.vllm.sameness import closing_rig, needs_vllm, same_as_native

pytestmark = [needs_vllm, pytest.mark.vllm]


def test_same_tokens_as_the_native_engine_with_and_without_drafts():
    with closing_rig("smollm2", "float32") as rig:
        vllm, requests = same_as_native(rig, 32)
        assert all(request.steps < len(request.tokens) for request in requests)
        rig.publish(1, 0.01)
        pulled = vllm.install(rig.store.handle.open(), 1, keep_cache=False)
        assert pulled == (1, rig.checksums[1])
        vllm.close()
