"""The device and the compute precision that `auto` means on this machine.

bfloat16 where the hardware multiplies it (CUDA from Ampere on, CPUs with AVX512-BF16 or AMX, ARM
with BF16); float32 elsewhere, and for models below `SMALL` parameters. Call overhead dominates the
steps of these (on one AVX512-BF16 core bfloat16 makes the demo only 1.1 to 1.2 times as fast), and
in float32 rollout and training agree on every log-probability."""

from __future__ import annotations

from pathlib import Path

import torch

from rhymeflow.config import ModelConfig
from rhymeflow.errors import UserError

SMALL = 20_000_000  # number of parameters below which `auto` is float32

_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def resolve_device(config: ModelConfig) -> torch.device:
    """Return the device of `config.device`. Raises `UserError` if there is no such GPU."""
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        build = torch.version.cuda
        reason = "finds no GPU" if build else f"is a CPU build ({torch.__version__})"
        raise UserError(f"model.device = 'cuda', but the installed torch {reason}")
    return torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")


def auto_dtype(num_parameters: int, device: torch.device) -> torch.dtype:
    """Return what `model.dtype = auto` means for a model of this size on this device."""
    if num_parameters < SMALL:
        return torch.float32
    fast = torch.cuda.is_bf16_supported(False) if device.type == "cuda" else cpu_has_bfloat16()
    return torch.bfloat16 if fast else torch.float32


def cpu_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the CPU has bfloat16 dot products; emulated ones are slower than float32."""
    if not cpuinfo.is_file():  # unknown outside Linux
        return False
    for line in cpuinfo.read_text().splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):  # x86, ARM
            return not _BFLOAT16_FLAGS.isdisjoint(flags.split())
    return False
