"""`state.log_history` as transformers has it: entries made of a run's rows of metrics.

An entry for training has the mean of the rows since the entry before (over their time, of what is a
share of that), and the last value of what is counted or set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from rhymeflow.observe.metrics import is_of_time, mean

_LATEST = ("num_tokens", "learning_rate", "time", "step_time", "endings/", "backup/")
"""How the names of metrics begin of which the latest value counts."""


class Rhythm(NamedTuple):
    """How rows become entries."""

    every: int = 1
    """Versions between two entries; 0: there are none."""
    has_first: bool = False
    """Whether there is one for the first version in any case."""
    steps_per_version: int = 1
    """Optimizer steps, which transformers counts."""
    versions_per_epoch: float = 0.0
    """0: not known."""

    def epoch(self, version: int) -> float:
        """How often the dataset was gone through."""
        return version / self.versions_per_epoch if self.versions_per_epoch else 0.0


class History:
    """The entries, in `entries`, of the rows that it is given."""

    def __init__(self, rhythm: Rhythm) -> None:
        self.entries: list[dict[str, Any]] = []
        self._rhythm, self._rows = rhythm, list[Mapping[str, Any]]()

    def trained(self, version: int, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """Take a version's row; return the entry that it completes."""
        self._rows.append(row)
        every = self._rhythm.every
        is_first = version == 1 and self._rhythm.has_first
        if not every or (version % every and not is_first):
            return None
        means = _joined(self._rows)
        self._rows = []
        return self._add(version, means)

    def evaluated(self, version: int, row: Mapping[str, Any]) -> dict[str, Any]:
        """Take the metrics of an evaluation; return the entry."""
        return self._add(version, {eval_name(name): value for name, value in row.items()})

    def read(self, rows: Mapping[int, Mapping[str, Any]]) -> None:
        """Take the rows of a run, by version."""
        for version, row in rows.items():
            evaluation = {k: v for k, v in row.items() if k.startswith("eval/")}
            training = {k: v for k, v in row.items() if k not in (*evaluation, "step", "time")}
            if "loss" in training:
                self.trained(version, training)
            if evaluation:
                self.evaluated(version, evaluation)

    def _add(self, version: int, metrics: dict[str, Any]) -> dict[str, Any]:
        rhythm = self._rhythm
        epoch, step = round(rhythm.epoch(version), 4), version * rhythm.steps_per_version
        self.entries.append({**metrics, "epoch": epoch, "step": step})
        return self.entries[-1]


def eval_name(name: str) -> str:
    """`eval/reward` as transformers writes it, `eval_reward`; of a suite the reward of its only
    answers, `eval/NAME/avg@1`, as `eval_NAME_reward`."""
    if not name.startswith("eval/"):
        return name
    suite, _, figure = name.removeprefix("eval/").rpartition("/")
    if "@" in figure:
        return f"eval_{suite}_{'reward' if figure == 'avg@1' else figure}"
    return "_".join(name.split("/", 2))


def _joined(rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    joined = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        # What is not finite, as the loss of a skipped step, is null where the rows are read later.
        given = [row[name] for row in rows if row.get(name) is not None]
        values = [each for each in given if not isinstance(each, float) or math.isfinite(each)]
        if values and name.startswith(_LATEST):
            joined[name] = values[-1]
        elif is_of_time(name):
            joined[name] = mean(rows, name)
        else:
            joined[name] = sum(values) / len(values) if values else None
    return joined
