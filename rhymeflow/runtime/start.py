"""What `train` refuses before it loads anything.

Holds true: a dry run refuses the same; nothing stays of it.
"""

from __future__ import annotations

from rhymeflow import check
from rhymeflow.config import Config
from rhymeflow.mirror.mirror import check_free
from rhymeflow.observe.metrics import check_installed


def check_start(config: Config) -> None:
    """Look for what the configuration names.

    Raises:
        UserError: something is not there, or the mirror is not free.
    """
    check.before_start(config)
    if config.runtime == "ray":
        from rhymeflow.runtime.ray.library import check_version

        check_version()
    check_installed(config.run.report_to)
    check_free(config)


__all__ = ["check_start"]
