"""A model over two processes: each pulls and proves for itself, and tokens are the same."""

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


def test_same_tokens_as_the_native_engine_with_drafts_and_new_weights():
    with closing_rig("demo", "float32", rollout__vllm_tensor_parallel_size="2") as rig:
        native = rig.engine("native")
        vllm = rig.engine("vllm")
        assert vllm.checksum == rig.checksums[0]
        for version in (0, 1):
            if version:
                rig.publish(version, 0.02)
                for engine in (native, vllm):
                    pulled = engine.install(rig.store.handle.open(), version, keep_cache=False)
                    assert pulled == (version, rig.checksums[version])
            expected = requests_of(rig, 40)
            drain(native, expected)
            vllm.draft_with(Knowing(answers_of(expected), rig.vocabulary, most=9, right=0.85))
            requests = requests_of(rig, 40)
            drain(vllm, requests)
            assert_same(requests, expected, 1e-3)
            vllm.draft_with(None)
        vllm.close()
