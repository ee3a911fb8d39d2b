"""From a dataset to lines of JSON: what rows hold, in types that every process is given alike.

Holds true: what cannot be handed to a reward function is a `UserError` that names dataset and row.
Arrays and numbers of NumPy become lists and numbers, times their ISO text. Knows nothing of files.
"""

from __future__ import annotations

import datetime
import decimal
import json
import sys
import uuid
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from rhymeflow.errors import UserError


def lines_of(dataset: Iterable[Any], name: str, most: int | None = None) -> list[str]:
    """Write the first `most` rows; all of them if that is None.

    Raises:
        UserError: there are none, or one cannot be written.
    """
    lines = [_line(row, f"{name}, row {i}") for i, row in enumerate(islice(dataset, most))]
    if not lines:
        raise UserError(f"Trainer: {name} is empty")
    return lines


def is_stream(dataset: Any) -> bool:
    """Whether it is a dataset of `datasets` that streams, perhaps without end."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(dataset, datasets.IterableDataset)


def from_hub(name: str, what: str) -> Any:
    """The split `train` of a dataset of the Hugging Face hub.

    Raises:
        UserError: `datasets` is not installed, or cannot have it.
    """
    from rhymeflow.data.files import extra

    datasets = extra("datasets", f"Trainer: {what} = {name!r}: a dataset of the hub", "data")
    try:
        return datasets.load_dataset(name, split="train")
    except (OSError, ValueError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise UserError(f"Trainer: {what} = {name!r}: no file, and the hub: {text}") from None


def _line(row: Any, where: str) -> str:
    if not isinstance(row, Mapping):
        raise UserError(f"Trainer: {where}: is a {type(row).__name__}, should be a mapping")
    try:
        return json.dumps(dict(row), ensure_ascii=False, default=_as_json)
    except (TypeError, ValueError) as error:
        raise UserError(f"Trainer: {where}: cannot be written as JSON: {error}") from None


def _as_json(value: Any) -> Any:
    """A value that JSON has no type for, as one that it has."""
    if hasattr(value, "dtype") and hasattr(value, "tolist"):  # NumPy's, torch's
        found = value.tolist()
        return _as_json(found) if isinstance(found, _TIMES) else found
    if isinstance(value, _TIMES):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal | uuid.UUID):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if hasattr(value, "isoformat"):  # of pandas
        return value.isoformat()
    hint = "; images are not there" if type(value).__module__.startswith("PIL") else ""
    raise TypeError(f"a {type(value).__name__} is in it{hint}")


_TIMES = (datetime.datetime, datetime.date, datetime.time)
