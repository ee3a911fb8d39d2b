"""A mixture of experts in vLLM: their new weights arrive, in one process and split over two."""

import pytest
import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

from rhymeflow.config.load import read_config
from rhymeflow.models.load import load_tokenizer
from tests.vllm.sameness import assert_same, closing_rig, drain, needs_vllm, requests_of

pytestmark = [needs_vllm, pytest.mark.vllm]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A directory with a model of six experts, of which each token takes two."""
    path = tmp_path_factory.mktemp("mixture")
    tokenizer = load_tokenizer(read_config("demo").model)
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=64,
            moe_intermediate_size=64,
            num_experts=6,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=256,
            initializer_range=0.3,
            tie_word_embeddings=False,
        )
    )
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_same_tokens_as_the_native_engine_with_new_weights(mixture, processes):
    with closing_rig(
        "demo", "float32", model__name=mixture, rollout__vllm_tensor_parallel_size=processes
    ) as rig:
        assert "model.layers.1.mlp.experts.down_proj" in rig.parameters
        native, vllm = rig.engine("native"), rig.engine("vllm")
        for version in (0, 1, 2):
            if version:
                rig.publish(version, 0.1)
                for engine in (native, vllm):
                    pulled = engine.install(rig.store.handle.open(), version, keep_cache=False)
                    assert pulled == (version, rig.checksums[version])
            expected, requests = requests_of(rig, 20), requests_of(rig, 20)
            drain(native, expected)
            drain(vllm, requests)
            assert_same(requests, expected, 1e-3)
        vllm.close()
