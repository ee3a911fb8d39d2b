"""vLLM with SmolLM2-135M in float32: token by token what the native engine generates."""

import pytest

from tests.vllm.sameness import (
    Knowing,
    answers_of,
    assert_same,
    closing_rig,
    drain,
    needs_vllm,
    requests_of,
)

pytestmark = [needs_vllm, pytest.mark.vllm]


def test_same_tokens_as_the_native_engine_with_and_without_drafts():
    with closing_rig("smollm2", "float32") as rig:
        expected = requests_of(rig, 32)
        drain(rig.engine("native"), expected)
        vllm = rig.engine("vllm")
        requests = requests_of(rig, 32)
        drain(vllm, requests)
        assert_same(requests, expected, 1e-3)
        vllm.draft_with(Knowing(answers_of(expected), rig.vocabulary, most=9, right=0.85))
        requests = requests_of(rig, 32)
        drain(vllm, requests)
        assert_same(requests, expected, 1e-3)
        assert all(request.steps < len(request.tokens) for request in requests)
        rig.publish(1, 0.01)
        pulled = vllm.install(rig.store.handle.open(), 1, keep_cache=False)
        assert pulled == (1, rig.checksums[1])
        vllm.close()
