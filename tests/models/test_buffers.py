"""An engine computes with published weights alone, also with tensors that are no parameters."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rhymeflow.config import LearnerConfig, ModelConfig, RolloutConfig
from rhymeflow.learner import published
from rhymeflow.learner.learner import Learner
from rhymeflow.learner.ranks import Ranks
from rhymeflow.models.buffers import buffers_of, published_buffers
from rhymeflow.models.load import empty_model, load_model
from rhymeflow.models.rows import WeightRows
from rhymeflow.weights.install import Installation
from rhymeflow.weights.publish import rows_of
from rhymeflow.weights.shared_memory import SharedMemoryWeightStore
from tests.engine.models import make_engine, make_requests, run, sampling

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 150, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 320,
    "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
BIASES, NUMBERS = "glm4_moe", "apertus"
"""Types whose routers have biases, whose activations have single numbers."""


@pytest.fixture(params=[BIASES, NUMBERS])
def saved(request, tmp_path):
    """A model, as transformers computes it, whose buffers are not as they are initialised."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[request.param](**SIZES)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for each in buffers_of(model).values():
        each += 0.3 + torch.rand(each.shape)
    model.save_pretrained(tmp_path)
    return tmp_path, model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_engine_gets_buffers_with_the_weights_in_float32(saved, dtype):
    directory, plain = saved
    config = ModelConfig(name=str(directory))
    trained = load_model(config, dtype=torch.float32, device=CPU)
    learner = Learner(trained, None, LearnerConfig(max_steps=1), RolloutConfig(), dtype)
    store = SharedMemoryWeightStore(learner.manifest())
    try:
        assert store.publish(0, learner.rows()) == learner.checksum()
        model = empty_model(config, dtype=dtype, device=CPU)
        assert all(each.isnan().all() for each in buffers_of(model).values())
        into = {**dict(model.named_parameters()), **published_buffers(model, dtype)}
        Installation(into).pull(store.handle.open())
    finally:
        store.close()
    found, expected = buffers_of(model), buffers_of(plain)
    assert found.keys() == expected.keys() != set()
    for name, each in expected.items():  # single numbers are in compute precision
        assert torch.equal(found[name], each if each.ndim else each.to(dtype))
    requests = make_requests((3, 17), sampling(max_new_tokens=6))
    run(make_engine(model), requests)
    for each in requests:
        with torch.no_grad():
            logits = plain(torch.tensor([each.prompt_ids + each.tokens])).logits[0]
        logprobs = logits.log_softmax(-1)[len(each.prompt_ids) - 1 : -1]
        due = logprobs.gather(1, torch.tensor(each.tokens)[:, None])[:, 0]
        error = float((torch.tensor(each.logprobs) - due).abs().max())
        assert error < (1e-4 if dtype == torch.float32 else 1.0)


def test_ranks_read_them_from_the_files_and_publish_their_rows(saved):
    directory, plain = saved
    model = WeightRows(ModelConfig(name=str(directory))).skeleton()
    found, expected = buffers_of(model), buffers_of(plain)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    ranks = [Ranks(n, 3) for n in range(3)]
    manifest = published.manifest_for(model, torch.float32)
    rows = [published.rows(model, torch.float32, each) for each in ranks]
    for name, each in expected.items():
        assert torch.equal(torch.cat([own[name] for own in rows]), torch.atleast_1d(each))
    for each, own in zip(ranks, rows, strict=True):
        for spec in rows_of(manifest, each):
            if spec.name in expected:
                assert own[spec.name].shape == spec.shape
