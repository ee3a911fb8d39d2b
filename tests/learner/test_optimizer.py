import math

import pytest
import torch
from torch import nn
from transformers import get_scheduler

from rhymeflow.learner.optimizer import Optimizer, learning_rate
from tests.learner.builders import learner_config


def _module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def _feed(module: nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
    return module(x.to(next(module.parameters()).dtype)).float().square().mean()


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_learning_rate_equals_transformers(kind: str, warmup: int):
    config = learner_config(lr_scheduler_type=kind, warmup_steps=warmup, max_steps=10)
    name = "constant_with_warmup" if kind == "constant" else kind
    adamw = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=config.learning_rate)
    scheduler = get_scheduler(name, adamw, num_warmup_steps=warmup, num_training_steps=10)
    for step in range(10):
        assert learning_rate(step, config) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12)
        adamw.step()
        scheduler.step()


@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
def test_float32_equals_plain_adamw(max_grad_norm: float | None):
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
