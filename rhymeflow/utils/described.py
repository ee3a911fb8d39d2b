"""What user code raised or gave, in one line."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any


def described(error: BaseException) -> str:
    """`ValueError: message (file.py:12)`, the place being the innermost one."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if text else ''}{text}{place}"


def shown(value: Any) -> str:
    """Return a value's type and the beginning of its `repr`, in one line."""
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
