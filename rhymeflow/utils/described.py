"""What user code raised, in one line."""

from __future__ import annotations

import traceback
from pathlib import Path


def described(error: BaseException) -> str:
    """`ValueError: message (file.py:12)`, the place being the innermost one."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if text else ''}{text}{place}"
