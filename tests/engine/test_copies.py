"""What products read in place of the weights is proved to be the weights."""

import numpy as np
import pytest
import torch

from rhymeflow.cpu import products
from rhymeflow.models.adapter_files import Adapter
from rhymeflow.models.copies import ADAPTER, KEPT, WHOLE, Copy, CopyProof
from rhymeflow.models.lora import attach, versioned
from rhymeflow.weights.proof import ChecksumMismatch
from tests.engine.models import SIZES, make_engine
from tests.learner import builders

KINDS = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen3": {}, "olmo2": {}}
"""Biases, norms of heads, and a model that runs in its own modules."""
TWO_LAYERS = SIZES | {"num_hidden_layers": 2}
ALL = ("all-linear",)


def engine_of(kind, targets=()):
    model = builders.tiny_model(kind, tied=False, **TWO_LAYERS, **KINDS[kind])
    if targets:
        attach(model, Adapter(3, 6.0, False, targets, ()))
    engine = make_engine(model.bfloat16())
    proof = CopyProof(engine._model, engine._lm_head, engine._body)
    next_version(engine, proof)
    return engine, proof


@torch.no_grad()
def next_version(engine, proof):
    for each in versioned(engine._model).values():
        each.mul_(0.99).add_(0.01)
    engine.set_version(engine.version + 1, keep_cache=False)
    proof.require_next()


def repeated(count, call):
    for _ in range(count):
        call()


def changed(copy, engine):
    """Change a number of the first tensor of a copy; return its name, and what undoes it."""
    module, name, _ = next(iter(copy.own()))
    names = {module: path for path, module in engine._model.named_modules()}
    dense = copy.held.to_dense() if copy.held.is_mkldnn else copy.held.clone()
    dense.view(-1)[1] += 0.01
    wrong = products._packed(dense) if copy.held.is_mkldnn else dense
    memory, before = copy.memory(), copy.memory().copy()
    memory[:] = Copy(wrong, list).memory()
    what = f"1 of .* changed in place .* first {names[module]}.{name}$"
    return what, lambda: np.copyto(memory, before)


@pytest.mark.parametrize(
    ("kind", "targets"), [*((kind, ALL) for kind in KINDS), ("llama", ("q_proj",))]
)
def test_a_copy_that_was_changed_in_place_is_named(kind, targets):
    """The adapter's before the next version is pulled, others within `KEPT` versions."""
    engine, proof = engine_of(kind, targets)
    for copy in proof._adapter():
        what, undo = changed(copy, engine)
        with pytest.raises(ChecksumMismatch, match=what):
            proof.require_adapter()
        undo()
    proof.require_adapter()
    for copy in proof._base():
        what, undo = changed(copy, engine)
        with pytest.raises(ChecksumMismatch, match=what):
            repeated(KEPT, proof.require_next)
        undo()
    proof.require_all()


@pytest.mark.parametrize("targets", [(), ALL], ids=["whole", "adapter"])
@pytest.mark.parametrize("kind", ["llama", "olmo2"])
def test_what_is_packed_wrong_is_found(kind, targets, monkeypatch):
    """At the start all is compared, then a part with each version."""
    (engine, proof), pack = engine_of(kind, targets), products._packed
    proof.require_all()
    if targets:
        monkeypatch.setattr(products.Repacked, "refresh", lambda self: None)
    else:
        monkeypatch.setattr(products, "_packed", lambda weight_OI: pack(weight_OI.roll(1)))
    with pytest.raises(ChecksumMismatch, match=r"first (model\.layers|lm_head).*(weight|lora_.)$"):
        repeated(ADAPTER if targets else WHOLE, lambda: next_version(engine, proof))
    with pytest.raises(ChecksumMismatch):
        proof.require_all()
