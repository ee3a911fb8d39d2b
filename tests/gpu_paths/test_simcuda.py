"""The simulated device refuses what a GPU refuses, counts, and leaves nothing behind."""

import pytest
import torch
from torch import nn

from tests.gpu_paths.simcuda import CudaTensor, SimCuda


def test_values_are_the_cpus_and_other_devices_are_refused(sim):
    x = torch.arange(12.0).view(3, 4)
    y = x.to("cuda")
    z = (y @ y.T + y[:, :1])[1:].softmax(1)
    assert z.is_cuda
    assert torch.equal(z.cpu(), (x @ x.T + x[:, :1])[1:].softmax(1))
    for other, where in ((x, "cpu"), (x.to("cuda:1"), "cuda:1")):
        with pytest.raises(RuntimeError, match=f"on .*{where}.* at tests/gpu_paths/test_simcuda"):
            y + other
    for to_host in (y.numpy, y.__array__):
        with pytest.raises(TypeError, match="numpy"):
            to_host()
    y[0] = 7.0
    y.view(-1)[4:6].add_(y.new_ones(2))
    assert y.tolist() == [[7.0] * 4, [5.0, 6.0, 6.0, 7.0], [8.0, 9.0, 10.0, 11.0]]
    assert y[torch.tensor([1])].cpu().tolist() == [[5.0, 6.0, 6.0, 7.0]]


def test_what_the_host_waits_for_and_copies_is_counted(sim):
    x = torch.zeros(10, dtype=torch.float32).to("cuda")
    assert sim.bytes == {("to device", "pageable"): 40}
    assert not sim.waits
    y = x + 1
    assert sim.kernels.total() == 1
    for number, wait in enumerate((
        y.cpu, y.tolist, y[0].item, y.nonzero, lambda: y[y > 0], lambda: bool((y > 0).all()),
        torch.cuda.synchronize, torch.cuda.Stream().record_event().synchronize,
    )):  # fmt: skip
        wait()
        assert sim.waits.total() == number + 1
    [(line, _)] = sim.kernels.most_common(1)
    assert line.startswith("tests/gpu_paths/test_simcuda.py:")
    assert sim.num_copies("to host") == 2
    sim.reset()
    torch.tensor([1, 2, 3], device="cuda")
    assert (sim.num_copies("to device"), sim.num_bytes("to device")) == (1, 24)


def test_pinned_copies_are_made_when_they_are_waited_for(sim):
    host = torch.zeros(4, pin_memory=True)
    assert host.is_pinned()
    assert host[2:].is_pinned()
    assert not torch.zeros(4).is_pinned()
    x = torch.ones(4, device="cuda")
    host.copy_(x, non_blocking=True)
    x.zero_()  # comes after the copy
    assert (host.tolist(), sim.waits.total()) == ([0.0] * 4, 0)
    event = torch.cuda.Event()
    event.synchronize()
    assert (host.tolist(), sim.waits.total()) == ([0.0] * 4, 0), "it is of no copy"
    event.record()
    event.synchronize()
    assert (host.tolist(), sim.waits.total()) == ([1.0] * 4, 1)
    x.copy_(host, non_blocking=True)
    host.fill_(5.0)  # before the copy was made: a mistake
    assert x.tolist() == [5.0] * 4
    assert sim.bytes["to host", "pinned"] == sim.bytes["to device", "pinned"] == 16
    pageable = torch.zeros(4)
    pageable.copy_(x, non_blocking=True)  # waits all the same
    assert pageable.tolist() == [5.0] * 4


def test_gradients_and_modules(sim):
    def trained(device: str) -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 5), nn.GELU(), nn.Linear(6, 9))
        model[1] = nn.Linear(6, 6, bias=False)
        model[3].weight = model[0].weight
        model = model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            out = model(torch.tensor([1, 3, 5], device=device))
            out.log_softmax(1)[:, 2].sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, out

    (on_cpu, expected), (on_cuda, out) = trained("cpu"), trained("cuda")
    assert on_cuda[3].weight is on_cuda[0].weight
    assert all(
        isinstance(p, CudaTensor) and isinstance(p, nn.Parameter) for p in on_cuda.parameters()
    )
    torch.testing.assert_close(out.detach().cpu(), expected.detach())
    for a, b in zip(on_cuda.parameters(), on_cpu.parameters(), strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach())


def test_nothing_is_left_behind():
    assert not torch.cuda.is_available()
    assert SimCuda.current is None
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")
    x = torch.ones(2, requires_grad=True)
    x.sum().backward()
