"""What `train` refuses before it makes a directory.

Holds true: a dry run refuses the same; nothing stays of it.
"""

from __future__ import annotations

from pathlib import Path

from rhymeflow import check
from rhymeflow.config import Config
from rhymeflow.mirror.mirror import check_free
from rhymeflow.observe.metrics import check_installed
from rhymeflow.runtime.run_dir import check_run_dir


def check_start(config: Config, run_dir: Path) -> None:
    """Look for what the configuration names, and for the place of the run.

    Raises:
        UserError: something is not there, or the run directory is not free.
    """
    check.before_start(config)
    if config.runtime == "ray":
        from rhymeflow.runtime.ray.library import check_version

        check_version()
    check_installed(config.run.report_to)
    check_run_dir(run_dir)
    check_free(config)


__all__ = ["check_start"]
