"""Two processes add up numbers, as ranks of the learner do; this module is their program."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import torch

from rhymeflow.learner.ranks import Ranks, address_of, meeting_place, own_gpu
from rhymeflow.utils import gpus

PATIENCE = 60.0
"""Seconds after which a rank that the other does not answer gives up."""


def exchange(kind: str, num_bytes: int) -> tuple[str, str, bool]:
    """By NCCL on two GPUs for `cuda`, by gloo for `cpu`: what was done, GB/s or what failed, and
    whether it worked."""
    place = meeting_place(2)
    command = [sys.executable, "-m", __name__, address_of(place), kind, str(num_bytes)]
    seen = gpus.visible() if kind == "cuda" else ("", "")  # each sees one, as ranks of a run do
    ranks = [
        subprocess.Popen(
            [*command, rank], env=os.environ | {gpus.VISIBLE: name}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank, name in zip("01", seen, strict=False)
    ]  # fmt: skip
    said = [rank.communicate()[0].strip().splitlines()[-1:] for rank in ranks]
    what = f"two ranks add up {num_bytes / 1e6:.1f} MB by {'NCCL' if kind == 'cuda' else 'gloo'}"
    if failed := [lines for rank, lines in zip(ranks, said, strict=True) if rank.returncode]:
        return what, f"{' '.join(failed[0])}; NCCL_DEBUG=INFO says more", False
    return f"{what}: GB/s", said[0][0], True


def add_up(address: str, kind: str, num_bytes: str, rank: str) -> float:
    """Add up numbers as one of two ranks, twice; return the GB/s of the second time."""
    device = own_gpu(torch.device(kind))
    ranks = Ranks.meet(address, int(rank), 2, device, PATIENCE)
    values = torch.ones(int(num_bytes) // 4, device=device)
    for total in (2.0, 4.0):
        started = time.perf_counter()
        torch.distributed.all_reduce(values)
        assert values[-1].item() == total, "the sum is wrong"  # waits for the device
    seconds = time.perf_counter() - started
    ranks.leave()
    return values.nbytes / seconds / 1e9


if __name__ == "__main__":
    print(f"{add_up(*sys.argv[1:]):.3g}")
