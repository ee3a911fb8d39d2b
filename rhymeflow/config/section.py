"""The base class of the configuration's sections, and types of fields.

Every default of Rhymeflow is in this package. Fields have TRL's names where TRL has the same thing.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

_LARGEST = 2**63 - 1  # of a signed 64-bit integer

Positive = Annotated[int, Field(gt=0, le=_LARGEST)]
NonNegative = Annotated[int, Field(ge=0, le=_LARGEST)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]

LEAST_TEMPERATURE = 1e-6
"""Smallest temperature except 0: logits divided by a smaller one may exceed float32's range."""


def _can_divide(temperature: float) -> float:
    if 0 < temperature < LEAST_TEMPERATURE:
        raise ValueError(
            f"given {temperature:g}, should be 0 (greedy) or at least {LEAST_TEMPERATURE:g}"
        )
    return temperature


Temperature = Annotated[float, Field(ge=0), AfterValidator(_can_divide)]


class Section(BaseModel):
    """Base of every section: immutable; unknown fields are errors; defaults are validated."""

    by_name: ClassVar[str | None] = None
    """The field to set if text is given in place of the section, as in `schedule: synchronous`.
    `None`: text is a mistake."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # `options` may hold infinity and NaN
        use_attribute_docstrings=True,
    )
