"""Profiles: the costs of a model on a kind of device, by name or from a file.

A profile's `source` says where its numbers come from. The files beside this one ship with the
package; `rhymeflow calibrate` writes more.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, PositiveInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from rhymeflow.config.fields import Origin, message
from rhymeflow.core.cost import CostModel
from rhymeflow.errors import UserError, suggestion
from rhymeflow.utils.disk import check_writable as check_writable_directory

_SHIPPED = Path(__file__).parent

Text = Annotated[str, Field(min_length=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class Profile:
    """The cost of one model on one kind of device. Times in seconds."""

    name: Text
    description: Text
    """One line: the model and the devices."""
    source: Text
    """Where the numbers come from, and what was assumed."""
    k1: Seconds
    """Per KV token and decode iteration; see `core.cost` for this and the next four."""
    k2: Seconds
    k3: Seconds
    c: Seconds
    k4: Seconds
    prefill_token: Seconds
    """Per token that an instance prefills."""
    train_token: Seconds
    """Device-seconds per trained token; d devices take 1/d of it."""
    measure_token: Seconds
    """Device-seconds per token of groups whose rewards are all equal: no backward pass."""
    train_step: Seconds
    """Per training step, whatever its size and the number of devices."""
    push: Seconds
    """For the learner to publish a version."""
    pull: Seconds
    """For an instance to load a version."""
    devices_per_instance: PositiveInt
    kv_capacity: PositiveInt
    """Tokens that the KV cache of one instance holds."""
    of_adapter: bool = False
    """Whether an adapter was trained, not all weights."""

    def cost(self, train_devices: int) -> CostModel:
        """Return the cost model of a run whose learner has `train_devices` devices."""
        assert train_devices > 0, train_devices
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(CostModel)}
        shared = {name: values[name] / train_devices for name in ("train_token", "measure_token")}
        return CostModel(**values | shared)


_PROFILE = TypeAdapter(Profile)


def names() -> list[str]:
    """Return the names of the shipped profiles."""
    return sorted(path.stem for path in _SHIPPED.glob("*.json"))


def load(name_or_path: str) -> Profile:
    """Return the shipped profile of this name, or the one in a file whose name ends in `.json`.
    Raises `UserError` if there is no such profile, or a field of the file is wrong."""
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
    """Check that `save` can write to `path`, before anything is measured. Raises `UserError` if the
    name does not end in `.json`, or the file cannot be written."""
    if path.suffix != ".json":
        raise UserError(f"--output: {path}: the name of a profile's file ends in .json")
    if path.is_dir():
        raise UserError(f"--output: {path} is a directory")
    check_writable_directory(path.parent, "--output")


def _read(path: Path) -> Profile:
    try:
        return _PROFILE.validate_json(path.read_text(), strict=True)
    except OSError as error:
        raise UserError(f"{path}: the profile cannot be read: {error.strerror}") from None
    except ValidationError as error:
        details: dict[str, Any] = dict(error.errors()[0])
    if details["type"] == "json_invalid":
        raise UserError(f"{path}: is not JSON: {details['ctx']['error']}")
    if details["type"] == "unexpected_keyword_argument":
        name = str(details["loc"][0])
        hint = suggestion(name, [field.name for field in dataclasses.fields(Profile)])
        raise UserError(f"{path}: {name}: there is no such field{hint}")
    raise UserError(message(details, Origin(str(path))))
