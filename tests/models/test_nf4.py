"""Weights of 4 bits under an adapter are bitsandbytes' own, in learner, engine and files alike."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM

from rhymeflow import check, memory
from rhymeflow.config import LoraConfig, ModelConfig
from rhymeflow.config.load import build_config
from rhymeflow.engine.base import NoiseKey, Request
from rhymeflow.engine.native.body import Modules
from rhymeflow.engine.native.native_engine import NativeEngine
from rhymeflow.errors import UserError
from rhymeflow.export.merged import write_merged
from rhymeflow.learner.learner import Learner
from rhymeflow.learner.logprobs import TokenScorer
from rhymeflow.learner.packing import pack
from rhymeflow.learner.sample import Sample
from rhymeflow.models import nf4
from rhymeflow.models.adapter_files import adapter_for
from rhymeflow.models.buffers import buffers_of
from rhymeflow.models.lora import (
    adapter_in,
    at_start,
    load_policy,
    save_adapter,
    unversioned,
    versioned,
)
from rhymeflow.models.nf4 import NF4Linear
from rhymeflow.models.rows import WeightRows
from rhymeflow.store.checkpoint_dirs import CheckpointDir
from rhymeflow.weights.proof import ChecksumMismatch
from rhymeflow.weights.shared_memory import SharedMemoryWeightStore
from tests.engine.models import sampling, tiny_model
from tests.families import cases
from tests.learner.builders import copied, equal, learner_config, made_up_batch, rollout_config
from tests.refused import refusal
from tests.runtime.tiny import save_model, tiny_config

bitsandbytes = pytest.importorskip("bitsandbytes.functional")
CPU = torch.device("cpu")
LORA = {"dtype": "float32", "lora": {"rank": 4}, "quantization": "nf4"}


@pytest.fixture(params=["llama", "olmo2"])
def config(request, tmp_path):
    """The first runs in the engine's own layers, the other in its modules."""
    config = tiny_config(tmp_path, model=LORA)
    save_model(tmp_path / "model", unused_ids=10)  # with as many as `made_up_batch` has
    if request.param != "llama":
        tiny_model(request.param, "eager").save_pretrained(tmp_path / "model")
    return config


def make_learner(config, **changes):
    model = load_policy(config.model, dtype=torch.float32, device=CPU, seed=5)
    settings = learner_config(**{"learning_rate": 0.05, "weight_decay": 0.1} | changes)
    return Learner(model, None, settings, rollout_config(), torch.float32)


def frozen(model):
    return copied({**unversioned(model), **buffers_of(model)})


def test_the_engine_samples_from_what_the_learner_trains(config, tmp_path):
    learner = make_learner(config, gradient_checkpointing=True, beta=0.1)
    before = frozen(learner.model)
    store = SharedMemoryWeightStore(learner.manifest())
    try:
        store.publish(0, learner.rows())
        engine = NativeEngine(config, store.handle.open(), instance="a", drafter_for=None)
        assert learner.train(made_up_batch(), 0)["kl"] == pytest.approx(0.0, abs=1e-6)
        learner.train(made_up_batch(seed=1), 1)
        checksum = store.publish(2, learner.rows())
        assert engine.install(store.handle.open(), 2, keep_cache=False) == (2, checksum)
    finally:
        store.close()
    assert equal(before, frozen(learner.model))
    packed = engine._copies._base()[1].memory()
    packed[1] ^= 1
    with pytest.raises(ChecksumMismatch, match=r"layers\.0\..*_proj\.weight"):
        engine._copies.require_all()
    packed[1] ^= 1
    request = Request(0, [2, 3, 12, 5], NoiseKey(0, 0, 0), sampling(max_new_tokens=20))
    engine.submit(request)
    while engine.has_work:
        engine.step()
    zeros = [0] * len(request.tokens)
    sample = Sample(0, request.prompt_ids, request.tokens, request.logprobs, zeros, 1.0, False)
    (row,) = pack([sample], range(1), 1000)
    scorer = TokenScorer(learner.model, rollout_config(), 64)
    expected = torch.tensor(request.logprobs)
    torch.testing.assert_close(scorer.score(row)[0], expected, atol=1e-5, rtol=0)
    with at_start(learner.model):
        assert (scorer.score(row)[0] - expected).abs().max() > 0.05

    learner.snapshot().write(CheckpointDir(tmp_path / "step-2"))
    again = load_policy(ModelConfig(name=str(tmp_path / "step-2")), dtype=torch.float32, device=CPU)
    own = TokenScorer(again, rollout_config(), 64).score(row)[0]
    assert torch.equal(own, scorer.score(row)[0])


def test_weights_are_those_of_bitsandbytes(config, tmp_path, monkeypatch):
    monkeypatch.setattr(nf4, "_AT_A_TIME", 640)
    model = load_policy(config.model, dtype=torch.float32, device=CPU)
    plain = AutoModelForCausalLM.from_pretrained(config.model.name)
    for name, layer in plain.named_modules():
        if name.endswith("proj"):
            found = model.get_submodule(name)
            assert isinstance(found, NF4Linear)
            codes = bitsandbytes.quantize_4bit(layer.weight, blocksize=64, quant_type="nf4")
            assert torch.equal(found.weight, bitsandbytes.dequantize_4bit(*codes))
    assert type(model.get_output_embeddings()) is torch.nn.Linear
    kept = {n: p for n, p in unversioned(model).items() if "norm" in n or "embed" in n}
    assert kept.keys() == unversioned(model).keys() - {"lm_head.weight"}
    assert all(torch.equal(plain.get_parameter(name), each) for name, each in kept.items())


def test_an_export_has_them_merged(config, tmp_path):
    learner = make_learner(config)
    learner.train(made_up_batch(), 0)
    learner.snapshot().write(CheckpointDir(tmp_path / "step-1"))
    write_merged(tmp_path / "step-1", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    ids = torch.tensor([[3, 17, 5, 2, 8, 8, 7]])
    learner.model.set_attn_implementation("eager")
    with torch.no_grad():
        found, expected = (each(input_ids=ids).logits for each in (merged, learner.model))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_one_layer_at_a_time_is_whole_while_a_model_is_read(config, monkeypatch):
    """The model in its own precision may be what the memory has no room for."""
    read, whole = WeightRows.read, []

    def counted(self, name, *rows):
        assert all(each.expired() for each in whole), name
        values = read(self, name, *rows)
        if name.endswith("proj.weight"):
            whole.append(StorageWeakRef(values.untyped_storage()))
        return values

    monkeypatch.setattr(WeightRows, "read", counted)
    model = load_policy(config.model, dtype=torch.float32, device=CPU)
    assert len(whole) == sum(isinstance(each, NF4Linear) for each in model.modules()) > 0


def test_what_is_trained_whole_keeps_its_bits(config):
    lora = LoraConfig(rank=2, modules_to_save=("layers.0.mlp",))
    whole = config.model.model_copy(update={"lora": lora})
    layers = load_policy(whole, dtype=torch.float32, device=CPU).model.layers
    assert type(layers[0].mlp.down_proj) is torch.nn.Linear
    assert layers[0].mlp.down_proj.weight.requires_grad
    assert isinstance(layers[1].mlp.down_proj, NF4Linear)


def test_the_plan_counts_four_bits_and_a_scale(config):
    size, model = memory.model_here(config), make_learner(config).model
    assert size.weights == sum(
        each.nbytes for each in (*model.parameters(), *buffers_of(model).values())
    )
    Modules(model)  # an engine on CPUs, before it packs them
    held = [each._held.nbytes for each in model.modules() if isinstance(each, NF4Linear)]
    parts = {each.what: each.num_bytes for each in memory.of_instance(config, size, 10)}
    assert parts["weights of 4 bits made whole"] == sum(held)


def test_a_backward_pass_keeps_no_weight(config):
    (layer, *_) = (
        each
        for each in make_learner(config).model.modules()
        if type(each).__name__ == "LoraNF4Linear"
    )
    kept = []
    x = torch.ones(2, layer.in_features, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        layer(x).sum().backward()
    assert (layer.out_features, layer.in_features) not in kept
    expected = torch.ones(layer.out_features) @ layer.weight
    torch.testing.assert_close(x.grad[0], expected)  # a new adapter's B is zero


def test_what_has_no_four_bits_is_refused(tmp_path, monkeypatch):
    ranks = {"model.quantization": "nf4", "model.lora.rank": 2, "num_ranks": 2}
    assert "not with learner.num_ranks = 2" in refusal(build_config, ranks, where="T")
    alone = {"model.quantization": "nf4"}
    assert "no effect without `lora`" in refusal(build_config, alone, where="T")
    config = tiny_config(tmp_path, model=LORA, rollout={"engine": "vllm"})
    assert "not with model.quantization" in refusal(check.check_adapter, config)
    directory = tmp_path / "adapter"
    directory.mkdir()
    model = load_policy(config.model, dtype=torch.float32, device=CPU)
    save_adapter(directory, adapter_in(model), config.model.name, versioned(model))
    plain = ModelConfig(name=config.model.name, lora={"adapter": str(directory)})
    assert "give that too" in refusal(adapter_for, plain)
    cases.save("qwen3_moe", tmp_path / "mixture")
    mixture = ModelConfig(name=str(tmp_path / "mixture"), **LORA)
    with pytest.raises(UserError, match="no experts of a mixture"):
        load_policy(mixture, dtype=torch.float32, device=CPU)
    check.prove(config.changed(rollout={"engine": "native"}), has_engine=True)


def test_without_bitsandbytes_it_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    config = tiny_config(tmp_path, model=LORA)
    with pytest.raises(UserError, match="needs the package bitsandbytes: pip install"):
        load_policy(config.model, dtype=torch.float32, device=CPU)
