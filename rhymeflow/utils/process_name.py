"""What `top`, `ps -o comm` and `pkill` call a worker: `rf:learner`, `rf:rollout-0`, ...

Holds true: elsewhere than on Linux nothing happens.
"""

from __future__ import annotations

import sys
from pathlib import Path

PREFIX = "rf:"


def set_process_name(name: str) -> None:
    """Give this process the name `rf:NAME`, of which Linux keeps 15 characters."""
    if sys.platform == "linux":
        Path("/proc/self/comm").write_text(f"{PREFIX}{name}", encoding="utf-8")
