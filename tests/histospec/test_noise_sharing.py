"""Whose noise rhymes, and how often two policies then choose the same token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.config import Config
from rhymeflow.engine.native import noise
from rhymeflow.engine.native.noise import NoiseKey
from rhymeflow.histospec.noise_sharing import epoch_of_noise


def rhyming(num_members: int, share: float) -> list[int]:
    """The members whose noise is that of epoch 0; that of the others is met in no other epoch."""
    config, found = Config(rollout={"num_generations": num_members, "rhyming_noise": share}), []
    for member in range(num_members):
        epochs = [epoch_of_noise(config, epoch, member) for epoch in (0, 3, 4)]
        assert epochs in ([0, 0, 0], [0, 3, 4]), "runs that differ in the share alone begin alike"
        found += [member] if epochs == [0, 0, 0] else []
    return found


@given(st.integers(2, 64), st.floats(0, 1), st.floats(0, 1))
def test_the_first_members_rhyme_and_as_many_as_the_share_says(num_members, one, other):
    for share in (one, other):
        found = rhyming(num_members, share)
        assert found == list(range(len(found)))
        assert abs(len(found) - share * num_members) <= 0.5 + 1e-9
    small, great = (rhyming(num_members, share) for share in sorted((one, other)))
    assert set(small) <= set(great)


@pytest.mark.parametrize("change", [0.02, 0.3, 2.0])
def test_with_equal_noise_two_policies_agree_as_often_as_the_bound_says(change):
    """Equal choices: sum over v of 1 / sum over w of max(p_w / p_v, q_w / q_v), and at least
    (1 - TV) / (1 + TV); with other noise, sum over v of p_v q_v."""
    count, vocabulary = 20_000, 40
    generator = torch.Generator().manual_seed(7)
    p_V = torch.randn(vocabulary, generator=generator)
    q_V = p_V + change * torch.randn(vocabulary, generator=generator)
    positions = list(range(count))

    def choices(x_V: torch.Tensor, epoch: int) -> torch.Tensor:
        key = noise.stream(0, NoiseKey(5, epoch, 1))
        keys_R = noise.row_keys([key] * count, positions, torch.device("cpu"))
        return noise.draw(x_V.expand(count, -1), keys_R)

    old, new, other = choices(p_V, 0), choices(q_V, 0), choices(q_V, 1)
    p, q = p_V.double().softmax(0), q_V.double().softmax(0)
    chance = (1 / torch.maximum(p[None] / p[:, None], q[None] / q[:, None]).sum(1)).sum().item()
    variation = 0.5 * (p - q).abs().sum().item()
    error = 4 * (0.25 / count) ** 0.5
    assert chance >= (1 - variation) / (1 + variation)
    assert (old == new).double().mean().item() == pytest.approx(chance, abs=error)
    assert (old == other).double().mean().item() == pytest.approx((p @ q).item(), abs=error)
