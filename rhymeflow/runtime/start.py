"""What `train` refuses before it loads anything.

Holds true: a dry run refuses the same; nothing stays of it.
"""

from __future__ import annotations

from rhymeflow import check
from rhymeflow.config import Config
from rhymeflow.observe.metrics import check_installed
from rhymeflow.store.backup import check_free


def check_start(config: Config) -> None:
    """Look for what the configuration names.

    Raises:
        UserError: something is not there, or another run has its backup there.
    """
    check.before_start(config)
    if config.runtime == "ray":
        from rhymeflow.runtime.ray.library import check_version

        check_version()
    check_installed(config.run.report_to)
    check_free(config.run.backup)


__all__ = ["check_start"]
