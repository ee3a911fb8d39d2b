"""What every section of the configuration is: frozen, typed, unknown fields refused.

Holds true: every default of Rhymeflow is in this package and nowhere else; a `Config` that exists
is valid; two runs with equal configurations are the same run. Fields carry TRL's names where TRL
has the same thing. Knows nothing of files, torch or the machine.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

_LARGEST = 2**63 - 1  # what a machine's integer holds

Positive = Annotated[int, Field(gt=0, le=_LARGEST)]
NonNegative = Annotated[int, Field(ge=0, le=_LARGEST)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """Base of every section: immutable, unknown fields refused, defaults validated."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # in `options`, which may hold anything
    )
