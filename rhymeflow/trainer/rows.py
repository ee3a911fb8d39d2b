"""From a dataset to lines of JSON: what rows hold, in types that every process is given alike.

Holds true: what cannot be handed to a reward function is a `UserError` that names dataset and row;
all else is as `data.prompts.plain` takes it from a file. Knows nothing of files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from rhymeflow.data.prompts import plain
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
    where = f"Trainer: {where}"
    plain(dict.fromkeys(row), where)  # names of columns are text
    values = {name: plain(each, f"{where}: column {name!r}") for name, each in row.items()}
    return json.dumps(values, ensure_ascii=False)
