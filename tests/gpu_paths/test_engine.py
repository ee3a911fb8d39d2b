"""The native engine on a simulated device: the CPU's samples, and what an iteration costs."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rhymeflow.engine.native import noise
from rhymeflow.engine.native.sampler import Draws, sample
from rhymeflow.engine.vllm.sampler import UNKNOWN_LOGPROB, NoiseSlots, arguments
from tests.engine.drafters import FakeDrafter, answers_of, right
from tests.engine.models import HOWS, SIZES, make_engine, make_requests, run, sampling, tiny_model
from tests.families.cases import model_of
from tests.gpu_paths.simcuda import SimCuda
from tests.learner import builders

LENGTHS = (3, 3, 17, 1, 40, 9)


def test_the_sampler_draws_the_cpus_tokens(sim):
    torch.manual_seed(0)
    logits_RV = torch.randn(3 * len(HOWS), 1000) * 3
    draws = [Draws(sampling(**how), 10 + i, [i, 7, 300]) for i, how in enumerate(HOWS.values())]
    for chosen in (draws, draws[:1], draws[-1:]):  # several kinds, and one at a time
        rows_RV = logits_RV[: 3 * len(chosen)]
        found, expected = (sample(each, chosen) for each in (rows_RV.to("cuda"), rows_RV))
        assert found[0] == expected[0]
        assert found[1] == pytest.approx(expected[1], abs=1e-5)
    sim.reset()
    sample(logits_RV[:3].to("cuda"), draws[:1])
    assert sim.waits.total() <= 2, sim.waits


def test_vllms_processor_draws_them_without_waiting(sim, monkeypatch):
    """Two requests with three rows each; without room it says so."""
    torch.manual_seed(0)
    logits_RV, found = torch.randn(6, 1000), []
    hows = [sampling(), sampling(temperature=0.7, top_k=5)]
    for device in ("cpu", "cuda", "cuda"):
        slots = NoiseSlots(None, SimpleNamespace(max_num_reqs=3, device=torch.device(device)))
        for slot, how in enumerate(hows):
            slots.add_request(slot, SimpleNamespace(extra_args=arguments(how, slot, 9)))
        slots.apply_staged_writes()
        context = SimpleNamespace(
            expanded_idx_mapping=torch.arange(6, device=device) // 3,
            idx_mapping_np=np.arange(2),
            pos=torch.arange(9, 15, device=device),
        )
        on_device_RV = logits_RV.clone().to(device)
        sim.reset()
        found.append(slots.apply(on_device_RV, context))
        if device == "cuda":
            assert sim.waits.total() == 0, sim.waits
            monkeypatch.setattr(noise, "ROOM", 1)
            monkeypatch.setattr(noise, "ROOM_PER_ROW", 0)
    on_cpu, drawn, unknown = (each.cpu() for each in found)
    assert torch.equal(drawn.isfinite(), on_cpu.isfinite())
    torch.testing.assert_close(drawn, on_cpu)
    assert unknown.amax(1).tolist() == [UNKNOWN_LOGPROB] * 6


def decoding(sim: SimCuda, num_layers: int, drafts: int = 0) -> None:
    """Count the third iteration that decodes, all in one size class of the cache."""
    model = builders.tiny_model("qwen3", tied=False, **SIZES | {"num_hidden_layers": num_layers})
    expected = make_requests(LENGTHS)
    drafter = None
    if drafts:
        run(make_engine(model), expected)
        drafter = FakeDrafter(right(drafts), answers_of(expected))
    engine = make_engine(model.to("cuda"), drafter=drafter, max_prefill_tokens=512)
    for request in make_requests(LENGTHS):
        engine.submit(request)
    for _ in range(3):
        engine.step()
    sim.reset()
    engine.step()


@pytest.mark.parametrize(("drafts", "per_layer"), [(0, 66), (3, 70)])
def test_a_decode_iteration_keeps_its_budget(drafts, per_layer, sim):
    """It waits for tokens and their log-probabilities. To the device go ids, noise keys, and
    indices and mask of each size class."""
    kernels = []
    for num_layers in (1, 3):
        decoding(sim, num_layers, drafts)
        kernels.append(sim.kernels.total())
    assert sim.waits.total() <= 2, sim.waits
    assert sim.num_copies("to device") <= 4, sim.copies
    assert (kernels[1] - kernels[0]) / 2 <= per_layer
    assert kernels[0] - per_layer <= 90


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "minicpm3"])
def test_windows_caps_and_wide_keys_give_the_cpus_tokens(kind, sim):
    """With few rows and many, which have different blocks."""
    found = []
    for device in ("cpu", "cuda"):
        requests = make_requests(LENGTHS, sampling(max_new_tokens=9))
        model = model_of(kind).to(device)
        run(make_engine(model, max_prefill_tokens=40), requests)
        found.append(requests)
    for on_cpu, on_device in zip(*found, strict=True):
        assert on_device.tokens == on_cpu.tokens
        assert on_device.logprobs == pytest.approx(on_cpu.logprobs, abs=1e-4)


def test_new_weights_in_the_same_tensors_are_used(sim):
    model, new = (tiny_model(seed=seed).to("cuda") for seed in (0, 1))
    [old], [request] = make_requests([9]), make_requests([9])
    engine = make_engine(model)
    run(engine, [old])
    with torch.no_grad():
        for name, each in model.state_dict().items():
            each.copy_(new.state_dict()[name])
    engine.set_version(1, keep_cache=False)
    run(engine, [request])
    [expected] = make_requests([9])
    run(make_engine(new), [expected])
    assert request.tokens == expected.tokens != old.tokens
