"""Values that JSON has no type for, as ones that it has: of Parquet, NumPy, torch and pandas.

Holds true: one value becomes the same whether a file or `Trainer` brings it.
"""

from __future__ import annotations

import datetime
import decimal
import uuid
from typing import Any

_TIMES = (datetime.datetime, datetime.date, datetime.time)


def as_json(value: Any) -> Any:
    """Return arrays and numbers of NumPy as lists and numbers, times as ISO text, durations in
    seconds, decimals as text. The value itself: it is none of these."""
    if hasattr(value, "dtype") and hasattr(value, "tolist"):  # NumPy's, torch's
        found = value.tolist()
        return as_json(found) if isinstance(found, _TIMES) else found
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal | uuid.UUID):
        return str(value)
    if isinstance(value, set | frozenset):
        try:
            return sorted(value)
        except TypeError:  # in no order that is the same everywhere
            return value
    if isinstance(value, str):  # a subclass
        return str.__str__(value)
    if isinstance(value, _TIMES) or hasattr(value, "isoformat"):  # of pandas
        return value.isoformat()
    return value
