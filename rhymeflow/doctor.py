"""`rhymeflow doctor`: reports what this machine can run, what is missing, and how to install it."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from importlib import metadata

from rhymeflow.utils import shared_memory
from rhymeflow.utils.cores import usable_cores
from rhymeflow.utils.extras import EXTRAS, how_to_install


def examine() -> str:
    """Return the findings, one line each: `ok`, `--` (optional, missing) or `!!` (a problem)."""
    lines = [*_machine(), *_torch(), *_shared_memory(), *_extras()]
    return "\n".join(lines)


def _machine() -> Iterator[str]:
    cores = usable_cores()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    free = shutil.disk_usage(".").free / 1e9
    yield f"ok  Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield (
        f"ok  {cores} cores: the learner and the rollout instances share them"
        if cores > 1
        else "!!  1 core: learner and rollout take turns on it, nothing is gained by asynchrony"
    )
    yield f"{'ok' if memory > 3 else '!!'}  {memory:.1f} GB of memory (the demo takes about 2)"
    yield f"{'ok' if free > 1 else '!!'}  {free:.1f} GB free on this disk for run directories"


def _torch() -> Iterator[str]:
    import torch

    from rhymeflow.models.precision import cpu_has_bfloat16

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            memory = gpu.total_memory / 1e9
            yield f"ok  torch {torch.__version__}; GPU {index}: {gpu.name}, {memory:.0f} GB"
    elif torch.version.cuda is None:
        yield f"ok  torch {torch.__version__}, a CPU build; no GPU is used"
    else:
        yield f"!!  torch {torch.__version__} is a CUDA build and finds no GPU; the CPU is used"
    yield (
        "ok  the CPU multiplies bfloat16"
        if cpu_has_bfloat16()
        else "--  the CPU does not multiply bfloat16: float32 is used, several times slower"
    )


def _shared_memory() -> Iterator[str]:
    if not shared_memory.DIRECTORY.is_dir():
        if platform.system() == "Linux":
            yield "!!  /dev/shm is missing: weights pass between processes through shared memory"
        else:
            yield "ok  shared memory for weights and history; this system does not say how much"
        return
    free = shutil.disk_usage(shared_memory.DIRECTORY).free / 1e9
    yield f"ok  {free:.1f} GB of shared memory for weights and history (see `train --dry-run`)"


def _extras() -> Iterator[str]:
    for name, extra in EXTRAS.items():
        missing = [package for package in extra.packages if not _is_installed(package)]
        if missing:
            yield f"--  {extra.purpose}: missing {', '.join(missing)}; {how_to_install(name)}"
        else:
            yield f"ok  {extra.purpose}"


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
