"""vLLM under weights that come as changes: the tokens of the native engine, pull after pull."""

import pytest

from tests.vllm.sameness import assert_same, closing_rig, drain, needs_vllm, requests_of

pytestmark = [needs_vllm, pytest.mark.vllm, pytest.mark.timeout(300)]

NUM_TOKENS = 20
ATTENTION, MLP = "model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight"
STEPS = [ATTENTION, MLP, "model.embed_tokens.weight", "model.norm.weight", ATTENTION]


def test_same_tokens_as_the_native_engine_after_each_pull(monkeypatch):
    with closing_rig("demo", "float32", weights__transport="delta") as rig:
        native, vllm = rig.engine("native"), rig.engine("vllm")
        readers = {engine: rig.store.handle.open() for engine in (native, vllm)}
        rig.publish_some(1, ATTENTION, 0.0)
        vllm.install(readers[vllm], 1, keep_cache=False)  # is told of changes: all anew, and kept
        monkeypatch.setattr(readers[vllm], "pull", None)
        answers = []
        for version, name in enumerate(STEPS, 2):
            rig.publish_some(version, name, 0.05)
            found = []
            for engine, reader in readers.items():
                pulled = engine.install(reader, version, keep_cache=False)
                assert pulled == (version, rig.checksums[version])
                found.append(requests_of(rig, NUM_TOKENS))
                drain(engine, found[-1])
            assert_same(found[1], found[0], 1e-3)
            answers.append([request.tokens for request in found[1]])
        assert len(set(map(str, answers))) >= len(STEPS) - 1  # weights were others each time
        vllm.close()
