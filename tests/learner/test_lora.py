"""An adapter is trained alone, published alone, proved, and sampled from."""

import copy

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from rhymeflow import memory
from rhymeflow.config import LoraConfig
from rhymeflow.cpu import products
from rhymeflow.cpu.products import Repacked
from rhymeflow.engine.base import NoiseKey, Request
from rhymeflow.engine.native.native_engine import NativeEngine
from rhymeflow.errors import UserError
from rhymeflow.learner.learner import Learner
from rhymeflow.models.copies import ADAPTER
from rhymeflow.models.frozen_base import PARTS
from rhymeflow.models.load import load_model
from rhymeflow.models.lora import load_policy, unversioned
from rhymeflow.store.checkpoint_dirs import CheckpointDir
from rhymeflow.weights.proof import ChecksumMismatch
from rhymeflow.weights.shared_memory import SharedMemoryWeightStore
from tests.engine.models import sampling
from tests.learner.builders import (
    close,
    copied,
    equal,
    gradients,
    learner_config,
    made_up_batch,
    rollout_config,
)
from tests.runtime.tiny import save_model, tiny_config

CPU = torch.device("cpu")


@pytest.fixture
def config(tmp_path):
    config = tiny_config(tmp_path, model={"dtype": "float32", "lora": {"rank": 4}})
    save_model(tmp_path / "model", unused_ids=10)  # with as many as `made_up_batch` has
    return config


def make_learner(config, dtype=torch.float32, **changes):
    model = load_policy(config.model, dtype=dtype, device=CPU, seed=5)
    settings = learner_config(**{"learning_rate": 0.05, "weight_decay": 0.1} | changes)
    return Learner(model, None, settings, rollout_config(), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_adapter_is_trained_and_published(config, dtype):
    learner = make_learner(config, dtype, gradient_checkpointing=True)
    base, own = copied(unversioned(learner.model)), copied(learner.rows())
    for step in range(3):
        learner.train(made_up_batch(), step)
    assert equal(base, unversioned(learner.model))
    changed = learner.rows()
    assert all(not torch.equal(own[name], changed[name]) for name in own if "lora_" in name)
    assert {name.rpartition(".")[2] for name in changed} == {"lora_A", "lora_B", "base_checksum"}
    assert {each.dtype for name, each in changed.items() if "lora_" in name} == {dtype}
    trained = sum(each.numel() for name, each in changed.items() if "lora_" in name)
    states = [rows for _, _, rows in learner._optimizer.state()]
    assert sum(rows.numel() for rows in states) == 3 * trained
    assert sum(spec.num_bytes for spec in learner.manifest()) == trained * dtype.itemsize + 8


def test_gradients_are_those_of_peft(config):
    """Autograd through peft's own layers, in the same model, with the same values."""
    learner = make_learner(config)
    learner.train(made_up_batch(), 0)  # a new adapter's A has no gradient
    found, _ = gradients(learner, made_up_batch(seed=1))
    plain = load_model(config.model, dtype=torch.float32, device=CPU)
    shape = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    peft.inject_adapter_in_model(shape, plain, "default")
    theirs = dict(plain.named_parameters())
    for name, value in learner.rows().items():
        if "lora_" in name:
            theirs[f"{name}.default.weight"].data.copy_(value)
    twin = Learner(plain, None, learner._config, rollout_config(), torch.float32)
    expected, _ = gradients(twin, made_up_batch(seed=1))
    expected = {n.removesuffix(".default.weight"): g for n, g in expected.items() if "lora_" in n}
    close(found, expected, 1e-5)


def test_its_gradient_may_be_accumulated_before_the_batch_is_complete(config):
    batch, options = made_up_batch(), {"loss_type": "grpo", "adam_epsilon": 1e-3}
    whole, early = make_learner(config, **options), make_learner(config, **options)
    early.accumulate(batch[:8])
    early.train(batch[8:], 0)
    whole.train(batch, 0)
    close(early.rows(), whole.rows(), 1e-4)
    assert any(each.any() for name, each in early.rows().items() if name.endswith("lora_B"))


def test_what_is_frozen_in_any_case_is_not_frozen_by_name(config):
    with pytest.raises(
        UserError, match=r"'\*embed\*' matches no parameter that is trained; .*lora_A"
    ):
        make_learner(config, frozen_parameters=["*embed*"])
    learner = make_learner(config, frozen_parameters=["*layers.0*"])
    learner.train(made_up_batch(), 0)
    changed = {name for name, each in learner.rows().items() if name.endswith("B") and each.any()}
    assert changed
    assert all(".layers.1." in name for name in changed)


def test_the_reference_is_the_model_without_the_adapter(config):
    learner = make_learner(config, beta=0.1)
    assert learner.train(made_up_batch(), 0)["kl"] == pytest.approx(0.0, abs=1e-6)
    learner.train(made_up_batch(), 1)
    found = learner.train(made_up_batch(), 2)["kl"]
    twin = make_learner(config, beta=0.1)
    twin._reference = copy.deepcopy(twin._policy)  # its adapter is zero
    for step in range(3):
        expected = twin.train(made_up_batch(), step)["kl"]
    assert found == pytest.approx(expected, rel=1e-5)
    assert found > 1e-3


def test_an_adapter_that_a_run_starts_from_is_the_reference(config, tmp_path):
    """Also after a restart: the checkpoint's is another one by then."""
    first = make_learner(config)
    first.train(made_up_batch(), 0)
    first.snapshot().write(CheckpointDir(tmp_path / "given"))
    started = config.changed(model={"lora": LoraConfig(adapter=str(tmp_path / "given"))})
    learner, plain = make_learner(started, beta=0.1), make_learner(config, beta=0.1)
    assert learner.train(made_up_batch(), 0)["kl"] == 0.0
    learner.snapshot().write(CheckpointDir(tmp_path / "step-1"))
    again = make_learner(started, beta=0.1)
    again.restore(CheckpointDir(tmp_path / "step-1"))
    found = learner.train(made_up_batch(), 1)["kl"]
    assert again.train(made_up_batch(), 1)["kl"] == found > 1e-3
    plain.restore(CheckpointDir(tmp_path / "step-1"))
    assert plain.train(made_up_batch(), 1)["kl"] != pytest.approx(found, rel=0.05)


@pytest.fixture
def published(config):
    """A learner, its store, and an engine that has its first version."""
    learner = make_learner(config)
    store = SharedMemoryWeightStore(learner.manifest())
    store.publish(0, learner.rows())
    reader = store.handle.open()
    engine = NativeEngine(config, reader, instance="a", drafter_for=None)
    yield learner, store, reader, engine
    store.close()


def next_version(learner, store, reader, engine):
    version = learner.version + 1
    learner.train(made_up_batch(seed=version), version - 1)
    checksum = store.publish(version, learner.rows())
    pulled = engine.install(reader, version, keep_cache=False)
    assert pulled == (version, checksum)


def test_what_is_trained_is_what_is_sampled(config, published, tmp_path):
    """After three versions: by peft, from the checkpoint of the last."""
    learner, _, _, engine = published
    for _ in range(3):
        next_version(*published)
    learner.snapshot().write(CheckpointDir(tmp_path / "step-3"))
    plain = AutoModelForCausalLM.from_pretrained(config.model.name, attn_implementation="eager")
    reference = peft.PeftModel.from_pretrained(plain, tmp_path / "step-3").eval()
    request = Request(0, [2, 3, 12, 5], NoiseKey(0, 0, 0), sampling(max_new_tokens=20))
    engine.submit(request)
    while engine.has_work:
        engine.step()
    ids = torch.tensor([request.prompt_ids + request.tokens])
    targets = torch.tensor(request.tokens)[:, None]

    @torch.no_grad()
    def scored(model):
        predicted = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        return predicted[len(request.prompt_ids) - 1 : -1].gather(1, targets)[:, 0]

    found = torch.tensor(request.logprobs)
    torch.testing.assert_close(found, scored(reference), atol=1e-4, rtol=0)
    with reference.disable_adapter():
        assert (found - scored(reference)).abs().max() > 0.05
    engine_again = Request(0, request.prompt_ids, request.noise_key, request.sampling)
    next_version(*published)
    engine.submit(engine_again)
    while engine.has_work:
        engine.step()
    assert engine_again.logprobs != request.logprobs  # the next version is in use


@pytest.mark.parametrize("name", ["mlp.up_proj.lora_A", "self_attn.v_proj.lora_B"])
def test_an_adapter_that_was_changed_in_place_is_found(published, name):
    *_, engine = published
    next_version(*published)
    with torch.no_grad():
        engine._model.get_parameter(f"model.layers.1.{name}")[0, 0] += 1e-3
    with pytest.raises(ChecksumMismatch, match=f"changed in place .*layers.1.{name}"):
        next_version(*published)


@pytest.mark.parametrize("when", ["in place", "when packed"])
def test_what_products_read_of_an_adapter_is_proved(published, when, monkeypatch):
    *_, engine = published
    next_version(*published)
    if when == "in place":
        engine._copies._adapter()[1].memory()[0] ^= 64
    else:
        monkeypatch.setattr(Repacked, "refresh", lambda self: None)

    def a_few():
        for _ in range(ADAPTER):
            next_version(*published)

    with pytest.raises(ChecksumMismatch, match=r"in the copy .* first model\.layers\.0\..*lora_"):
        a_few()


def test_what_products_read_under_an_adapter_is_proved_at_the_start(config, published, monkeypatch):
    """Each copy, whatever the log-probabilities of a few sequences say."""
    _, _, reader, _ = published
    packed = products._packed

    def turned(weight_OI):
        return packed(weight_OI.roll(1) if min(weight_OI.shape) > 4 else weight_OI)  # its base

    monkeypatch.setattr(products, "_packed", turned)
    monkeypatch.setattr(NativeEngine, "prove", lambda self: None)
    with pytest.raises(ChecksumMismatch, match=r"in the copy that products read, first "):
        NativeEngine(config, reader, instance="b", drafter_for=None)


@pytest.mark.parametrize("whose", ["engine", "learner"])
def test_weights_under_an_adapter_that_were_changed_are_found(published, whose):
    """Within as many versions as there are parts, of which each is hashed in turn."""
    learner, *_, engine = published
    model = engine._model if whose == "engine" else learner.model
    with torch.no_grad():  # as a merge would
        model.model.layers[0].mlp.down_proj.weight += 1e-3

    def all_parts():
        for _ in range(PARTS):
            next_version(*published)

    with pytest.raises(ChecksumMismatch, match=r"changed in place .*layers.0.mlp.down_proj.weight"):
        all_parts()


def test_an_engine_with_another_base_is_refused(config, published, tmp_path):
    _, _, reader, _ = published
    model = AutoModelForCausalLM.from_pretrained(config.model.name)
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-3
    model.save_pretrained(config.model.name)
    with pytest.raises(ChecksumMismatch, match="under the adapter are not the learner's"):
        NativeEngine(config, reader, instance="b", drafter_for=None)


def test_the_plan_has_a_reference_only_of_an_adapter_to_start_from(config, tmp_path):
    config = config.changed(learner={"beta": 0.1})
    make_learner(config).snapshot().write(CheckpointDir(tmp_path / "start"))
    lora = LoraConfig(adapter=str(tmp_path / "start"))
    given = config.changed(model={"lora": lora})
    for each, what in (config, []), (given, ["reference: the adapter at the start"]):
        learner = make_learner(each, beta=0.1)
        kept = [m.start for m in learner.model.modules() if getattr(m, "start", None) is not None]
        parts = memory.of_rank(each, memory.model_here(each), 10)
        references = [part for part in parts if part.what.startswith("reference")]
        assert [part.what for part in references] == what
        assert memory.total(references) == sum(x.nbytes for pair in kept for x in pair)
