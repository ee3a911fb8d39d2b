"""Section `cluster`: the machines that `--dry-run` plans a run for."""

from __future__ import annotations

from rhymeflow.config.section import NonNegative, Positive, PositiveFloat, Section


class ClusterConfig(Section):
    """The machines that `--dry-run` plans a run for, all alike (docs/cluster.md).

    A run itself takes what it finds.
    """

    nodes: Positive | None = None
    """How many; `None`: this machine, whatever it has."""
    gpus_per_node: NonNegative = 8
    """GPUs of each."""
    gpu_memory_gb: PositiveFloat = 80.0
    """GB of each GPU."""
    memory_gb: PositiveFloat = 1000.0
    """GB of main memory of each."""
