"""Packed and joined layers compute what the plain ones do, and only inside the block."""

import pytest
import torch
from torch import nn

from rhymeflow.engine.native.linear import PackedLinears


class Block(nn.Module):
    def __init__(self, bias, dtype):
        super().__init__()
        sizes = {"q_proj": 24, "k_proj": 8, "v_proj": 8, "gate_proj": 40, "o_proj": 16}
        for name, size in sizes.items():
            self.add_module(name, nn.Linear(16, size, bias=bias, dtype=dtype))

    def forward(self, x, y):
        """k_proj gets another input than its siblings in the second place of the list."""
        names = ("q_proj", "k_proj", "v_proj", "gate_proj", "o_proj")
        outputs = [getattr(self, name)(x) for name in names]
        mixed = [self.q_proj(x), self.k_proj(y), self.v_proj(x), self.q_proj(x), self.q_proj(y)]
        return outputs + mixed


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_outputs_before_and_after_new_weights(bias, dtype):
    block = Block(bias, dtype)
    x, y = torch.randn(2, 1, 5, 16, dtype=dtype)
    close = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {}
    with torch.inference_mode():
        packed = PackedLinears(block)
        for _ in range(2):
            plain = block(x, y)
            with packed:
                fast = block(x, y)
            torch.testing.assert_close(fast, plain, **close)
            for parameter in block.parameters():
                parameter.copy_(torch.randn_like(parameter))
            packed.refresh()
