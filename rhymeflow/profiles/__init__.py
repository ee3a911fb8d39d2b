"""Profiles: how fast a kind of machine is with a kind of model, by name or from a file.

Where each number comes from stands in the profile's `source`. The files beside this one ship;
`rhymeflow calibrate` writes more.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rhymeflow.config.fields import brief
from rhymeflow.core.cost import CostModel
from rhymeflow.errors import UserError, suggestion
from rhymeflow.utils.disk import check_writable as check_writable_directory

_SHIPPED = Path(__file__).parent
_TEXTS = ("name", "description", "source")
_COUNTS = ("devices_per_instance", "kv_capacity")


@dataclass(frozen=True, slots=True)
class Profile:
    """The cost of one model on one kind of device. Times in seconds."""

    name: str
    description: str
    """One line: which model, on what."""
    source: str
    """Where the numbers come from, and what was assumed."""
    k1: float
    """Per KV token and decode iteration; see `core.cost` for this and the next four."""
    k2: float
    k3: float
    c: float
    k4: float
    prefill_token: float
    """Per token that an instance prefills."""
    train_token: float
    """Device-seconds per token trained on: with d devices it takes a d-th of it."""
    measure_token: float
    """The same of groups whose rewards are all equal, which need no backward pass."""
    train_step: float
    """Per training step, whatever its size and the number of devices."""
    push: float
    """For the learner to publish a version."""
    pull: float
    """For an instance to take a version."""
    devices_per_instance: int
    kv_capacity: int
    """Tokens that the KV cache of one instance holds."""

    def cost(self, train_devices: int) -> CostModel:
        """The cost model of a run whose learner has `train_devices` devices."""
        assert train_devices > 0, train_devices
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(CostModel)}
        shared = {name: values[name] / train_devices for name in ("train_token", "measure_token")}
        return CostModel(**values | shared)


def names() -> list[str]:
    """Names of the profiles that ship."""
    return sorted(path.stem for path in _SHIPPED.glob("*.json"))


def load(name_or_path: str) -> Profile:
    """Return the profile of this name, or the one in this file (it ends in `.json`).

    Raises:
        UserError: there is none, or the file holds no profile; says which field.
    """
    if name_or_path.endswith(".json"):
        return _read(Path(name_or_path))
    if name_or_path not in names():
        raise UserError(
            f"cost model {name_or_path!r}: there is no such profile ({', '.join(names())}), and "
            f"the name of a file ends in .json{suggestion(name_or_path, names())}"
        )
    return _read(_SHIPPED / f"{name_or_path}.json")


def save(profile: Profile, path: Path) -> None:
    """Write a profile for `load`. `UserError` if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(profile), indent=2) + "\n")
    except OSError as error:
        raise UserError(f"{path}: the profile cannot be written: {error.strerror}") from None


def check_writable(path: Path) -> None:
    """Look whether `save` can write there, before something is measured for it.

    Raises:
        UserError: the name would not be taken for a file's, or the directory cannot be written.
    """
    if path.suffix != ".json":
        raise UserError(f"--output: {path}: the name of a profile's file ends in .json")
    if path.is_dir():
        raise UserError(f"--output: {path} is a directory")
    check_writable_directory(path.parent, "--output")


def _read(path: Path) -> Profile:
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: the profile cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds {brief(values)}, should be an object of fields")
    known = [field.name for field in dataclasses.fields(Profile)]
    for name in values:
        if name not in known:
            raise UserError(f"{path}: {name}: there is no such field{suggestion(name, known)}")
    for name in known:
        if name not in values:
            raise UserError(f"{path}: {name}: is missing")
        if wrong := _mistake(name, values[name]):
            raise UserError(f"{path}: {name}: given {brief(values[name])}, should be {wrong}")
    return Profile(**values)


def _mistake(name: str, value: Any) -> str | None:
    """What the field should hold instead, or None."""
    if name in _TEXTS:
        return None if isinstance(value, str) and value else "a text"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name in _COUNTS:
        is_right = is_number and isinstance(value, int) and value > 0
        return None if is_right else "a whole number above 0"
    return None if is_number and math.isfinite(value) and value >= 0 else "a number, 0 or above"
