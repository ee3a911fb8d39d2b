import math

import pytest
import torch
from torch import nn
from transformers import get_scheduler

from rhymeflow.errors import UserError
from rhymeflow.learner.adamw_8bit import packed, unpacked
from rhymeflow.learner.optimizer import Optimizer, learning_rate
from rhymeflow.store.checkpoint_dirs import CheckpointDir
from tests.learner.builders import learner_config, made_up_batch, tiny_learner, tiny_model


def _module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def _feed(module: nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
    return module(x.to(next(module.parameters()).dtype)).float().square().mean()


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("constant_with_warmup", {"lr_scheduler_type": "constant"}),
        ("linear", {"lr_scheduler_type": "linear"}),
        ("cosine", {"lr_scheduler_type": "cosine"}),
        ("cosine_with_min_lr", {"lr_scheduler_type": "cosine", "min_lr_rate": 0.1}),
    ],
)
@pytest.mark.parametrize("warmup", [0, 3])
def test_learning_rate_equals_transformers(name, ours, warmup):
    config = learner_config(**ours, warmup_steps=warmup, max_steps=10)
    adamw = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=config.learning_rate)
    options = {"min_lr_rate": 0.1} if name == "cosine_with_min_lr" else {}
    how = {
        "num_warmup_steps": warmup,
        "num_training_steps": 10,
        "scheduler_specific_kwargs": options,
    }
    scheduler = get_scheduler(name, adamw, **how)
    for step in range(11):
        due = scheduler.get_last_lr()[0] / config.learning_rate
        assert learning_rate(step, config) / config.learning_rate == pytest.approx(due, abs=1e-12)
        adamw.step()
        scheduler.step()


@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
def test_float32_equals_plain_adamw(max_grad_norm):
    config = learner_config(weight_decay=0.1, max_grad_norm=max_grad_norm, adam_beta2=0.95)
    ours, plain = _module(), _module()
    optimizer = Optimizer(ours, config, torch.float32)
    decayed = [p for p in plain.parameters() if p.ndim == 2]
    others = [p for p in plain.parameters() if p.ndim == 1]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    for seed in range(4):
        _feed(ours, seed).backward()
        norm = optimizer.step(1e-2)
        adamw.zero_grad()
        _feed(plain, seed).backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), max_grad_norm or float("inf"))
        adamw.step()
        assert norm == pytest.approx(float(expected), rel=1e-5)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_muon_steps_the_matrices_of_layers_and_adamw_the_rest():
    """As torch's two do side by side; the tied embeddings are matrices, but of no layer."""
    options = {"weight_decay": 0.1, "adam_epsilon": 1e-4, "muon_momentum": 0.9}
    options |= {"max_grad_norm": None}
    ours, plain = (tiny_model("qwen2", attn="eager") for _ in "12")
    optimizer = Optimizer(ours, learner_config(optimizer="muon", **options), torch.float32)
    named = dict(plain.named_parameters())
    groups = [[], [], []]
    for name, each in named.items():
        groups[2 if each.ndim < 2 else 0 if ".layers." in name else 1].append(each)
    scale = {"lr": 1e-2, "weight_decay": 0.1}
    muon = torch.optim.Muon(groups[0], momentum=0.9, adjust_lr_fn="match_rms_adamw", **scale)
    scale |= {"eps": 1e-4, "fused": True}  # Muon's bfloat16 would amplify a difference
    adamw = torch.optim.AdamW(
        [{"params": groups[1]}, {"params": groups[2], "weight_decay": 0}], **scale
    )
    ids = torch.arange(20)[None]
    for _ in range(3):
        for model in (ours, plain):
            (model(ids).logits.square().mean() * 3.0).backward()
        optimizer.step(1e-2, 0.5)
        for each in named.values():
            each.grad *= 0.5
        for each in (muon, adamw):
            each.step()
            each.zero_grad()
    assert [len(group) for group in groups] == [14, 1, 11]
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_muon_is_refused_for_experts_in_one_tensor():
    with pytest.raises(UserError, match=r"optimizer = 'muon': .*experts\..* has the shape \[6, "):
        Optimizer(tiny_model("qwen3_moe"), learner_config(optimizer="muon"), torch.float32)


def test_moments_of_8_bits_take_nearly_adamws_steps():
    """Of values over nine decades. The root keeps all that is above 0."""
    rows = torch.randn(5, 700, generator=torch.Generator().manual_seed(0))
    wide = rows * 10.0 ** torch.linspace(-8, 1, 700)
    kept = unpacked(*packed(rows), rows)
    assert float((kept - rows).abs().max() / rows.abs().max()) < 0.011
    for values, divides in ((rows, False), (wide, False), (wide.abs(), True)):
        kept = unpacked(*packed(values, divides=divides), values)
        assert torch.equal(unpacked(*packed(kept, divides=divides), values), kept), "once is all"
        assert torch.equal(unpacked(*packed(values[2:4], divides=divides), values[2:4]), kept[2:4])
        assert not divides or bool((kept > 0).all())
    ours, plain = (nn.Linear(300, 40) for _ in "12")
    plain.load_state_dict(ours.state_dict())
    config = learner_config(optimizer="adamw_8bit", weight_decay=0.1, max_grad_norm=None)
    optimizer = Optimizer(ours, config, torch.float32)
    groups = [{"params": [plain.weight]}, {"params": [plain.bias], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)
    begun = plain.weight.detach().clone()
    for step in range(30):
        x = torch.randn(16, 300, generator=torch.Generator().manual_seed(step))
        for model in (ours, plain):
            (model(x).square().mean() + model(x)[:, :3].sum() * 0.1).backward()
        optimizer.step(1e-3)
        adamw.step()
        adamw.zero_grad()
    torch.testing.assert_close(ours.bias, plain.bias, rtol=0, atol=1e-3)
    moved, apart = (float((plain.weight - other).detach().norm()) for other in (begun, ours.weight))
    assert apart < 0.03 * moved
    codes, scales = optimizer._other.state[ours.weight]["exp_avg"]
    assert (codes.dtype, codes.numel(), scales.numel()) == (torch.uint8, 40 * 512, 40 * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["adamw_8bit", "muon"])
def test_a_checkpoint_goes_on_with_the_same_bits(tmp_path, optimizer, dtype):
    learner, other = (tiny_learner(optimizer=optimizer, dtype=dtype) for _ in "12")
    for step in range(2):
        learner.train(made_up_batch(seed=step), step)
    learner.snapshot().write(CheckpointDir(tmp_path / "step-2"))
    other.restore(CheckpointDir(tmp_path / "step-2"))
    assert other._optimizer.num_steps == 2
    for each in (learner, other):
        each.train(made_up_batch(seed=2), 2)
    assert learner.checksum() == other.checksum()


def test_bfloat16_masters_keep_what_bfloat16_would_lose():
    """Steps of 1e-5 on weights near 1 round away in bfloat16; the masters add them up."""
    module = nn.Linear(4, 1, bias=False)
    module.weight.data.fill_(1.0)
    optimizer = Optimizer(module, learner_config(max_grad_norm=None), torch.bfloat16)
    for _ in range(1000):
        module(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step(1e-5)
    assert module.weight.dtype == torch.bfloat16
    master = next(rows for name, _, rows in optimizer.state() if name == "master.weight")
    torch.testing.assert_close(master, torch.full((1, 4), 0.99), atol=1e-4, rtol=0)
    assert torch.equal(module.weight.data, master.bfloat16())


def test_bfloat16_gradients_add_up_in_float32():
    """1000 gradients of 1 onto one of 1000: bfloat16 cannot count past 256 by ones."""
    module = nn.Linear(1, 1, bias=False)
    optimizer = Optimizer(module, learner_config(max_grad_norm=None), torch.bfloat16)
    for _ in range(1000):
        module(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
    assert module.weight.grad is None
    assert optimizer.step(0.0) == pytest.approx(1000.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(dtype, value):
    module = _module()
    optimizer = Optimizer(module, learner_config(), dtype)
    before = [p.clone() for p in module.parameters()]
    (_feed(module, 0) + module[2].bias.float().sum() * value).backward()
    assert not math.isfinite(optimizer.step(1e-3))
    assert "in 1 of 4 parameters, first in 2.bias" in optimizer.skipped
    assert not optimizer._adamw.state
    for a, b in zip(module.parameters(), before, strict=True):
        assert torch.equal(a, b)
    _feed(module, 1).backward()
    assert math.isfinite(optimizer.step(1e-3))
    assert not optimizer.skipped
