"""One field of TRL's `GRPOConfig`, and what becomes of it here.

Holds true: a field has one fate. Knows nothing of what the fields are.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

Fate = Literal["mapped", "passed over", "refused"]
"""`mapped`: it sets fields of ours. `passed over`: it changes nothing in what is learned, so it has
no effect, and where it is given that is printed. `refused`: a run would be another one than what
was asked for, so with any value but TRL's default there is an error."""


class Field(NamedTuple):
    """A field of `GRPOConfig`: its name, type and default are TRL's."""

    name: str
    type: Any
    default: Any
    fate: Fate
    what: str
    """`mapped`: our fields. `passed over`: why. `refused`: what to do instead."""
    same: tuple[Any, ...] = ()
    """Further values that mean what the default means."""

    def is_default(self, value: Any) -> bool:
        """Whether the value asks for nothing that TRL would not do by itself."""
        return any(
            value == each and isinstance(value, bool) == isinstance(each, bool)
            for each in (self.default, *self.same)
        )


def to(name: str, type_: Any, default: Any, ours: str, *same: Any) -> Field:
    """A field that is mapped to fields of ours."""
    return Field(name, type_, default, "mapped", ours, same)


def over(name: str, type_: Any, default: Any, why: str, *same: Any) -> Field:
    """A field that is passed over."""
    return Field(name, type_, default, "passed over", why, same)


def no(name: str, type_: Any, default: Any, instead: str, *same: Any) -> Field:
    """A field that is refused."""
    return Field(name, type_, default, "refused", instead, same)
