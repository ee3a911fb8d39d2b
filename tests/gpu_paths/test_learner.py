"""The learner on a simulated device: the CPU's values, few waits, and checkpoints both ways."""

import pytest
import torch

from rhymeflow.learner.learner import Learner
from rhymeflow.store.checkpoint_dirs import CheckpointDir
from tests.gpu_paths.simcuda import SimCuda
from tests.learner.builders import made_up_batch, rollout_config, tiny_learner, tiny_model


def learner_on(
    device: str, kind: str = "llama", top_k: int = 0, num_hidden_layers: int = 2, **options: object
) -> Learner:
    """On the CPU with the attention that there is on a GPU."""
    model = tiny_model(kind, num_hidden_layers=num_hidden_layers).to(device)
    rollout = rollout_config(top_k=top_k, temperature=0.8 if top_k else 1.0)
    return tiny_learner(model=model, rollout=rollout, attention="sdpa", **options)


def step(learner: Learner, number: int, early: int = 0) -> dict[str, float]:
    batch = made_up_batch(seed=number)
    if early:
        learner.accumulate(batch[:early])
    metrics = learner.train(batch[early:], number)
    return {name: value for name, value in metrics.items() if name != "step_time"}


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: each.detach().cpu() for name, each in learner.rows().items()}


CASES = {
    "plain": {},
    "recomputed": {"gradient_checkpointing": True},
    "bfloat16": {"dtype": torch.bfloat16},
    "several steps": {"num_iterations": 2, "num_minibatches": 2, "max_tokens_per_microbatch": 90},
    "reference and top-k": {"beta": 0.1, "top_k": 5, "frozen_parameters": ["*norm*"]},
    "experts": {"kind": "qwen3_moe"},
    "early": {"early": 8},
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_has_the_cpus_values(case, sim):
    options = dict(CASES[case])
    early, found = options.pop("early", 0), {}
    for device in ("cpu", "cuda"):
        learner = learner_on(device, **options)
        metrics = [step(learner, number, early) for number in range(2)]
        assert {each.device.type for each in learner.rows().values()} == {device}
        found[device] = metrics, weights(learner)
    tolerance = 0.03 if "dtype" in options else 1e-4
    for a, b in zip(*(metrics for metrics, _ in found.values()), strict=True):
        assert a == pytest.approx(b, rel=tolerance, abs=tolerance)
    torch.testing.assert_close(*(made for _, made in found.values()), rtol=0.02, atol=tolerance)


def test_a_step_waits_for_its_norms_and_once_for_all_metrics(sim):
    learner = learner_on("cuda", max_tokens_per_microbatch=80, num_minibatches=2)
    step(learner, 0)
    sim.reset()
    step(learner, 1)
    assert sim.waits.total() <= 2 + 1, sim.waits


def kernels_and_waits(sim: SimCuda, monkeypatch: pytest.MonkeyPatch, **sizes: int) -> list[tuple]:
    """Of each micro-batch of a step."""
    learner = learner_on("cuda", max_tokens_per_microbatch=80, **sizes)
    found, add = [], learner._add_gradient

    def counted(*arguments: object, **named: object) -> None:
        sim.reset()
        add(*arguments, **named)
        found.append((sim.kernels.total(), sim.waits.total()))

    monkeypatch.setattr(learner, "_add_gradient", counted)
    step(learner, 0)
    return found


def test_a_micro_batch_never_waits_and_takes_so_many_kernels(sim, monkeypatch):
    few, many = (kernels_and_waits(sim, monkeypatch, num_hidden_layers=n) for n in (1, 3))
    assert len(few) > 2
    assert {waits for _, waits in few + many} == {0}
    layers = [(b - a) / 2 for (a, _), (b, _) in zip(few, many, strict=True)]
    assert max(layers) <= 175  # forward and backward
    assert max(kernels - layer for (kernels, _), layer in zip(few, layers, strict=True)) <= 168


@pytest.mark.parametrize("there", ["cpu", "cuda"])
@pytest.mark.parametrize("here", ["cpu", "cuda"])
def test_a_checkpoint_goes_on_on_any_device(here, there, tmp_path, sim):
    learner, other = learner_on(here), learner_on(there)
    place = CheckpointDir(tmp_path / "step-1")
    step(learner, 0)
    learner.snapshot().write(place)
    assert other.restore(place) == 1
    assert other.checksum() == learner.checksum()
    metrics = [step(each, 1) for each in (learner, other)]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(weights(learner), weights(other), rtol=1e-4, atol=1e-5)
