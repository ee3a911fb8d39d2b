"""What a user's function can be given by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rhymeflow.errors import UserError, nearest

NOTHING: Mapping[str, Any] = {}


class Arguments:
    """The arguments of a function, or of a class."""

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = inspect.signature(function).parameters
        by_name = {
            name: each
            for name, each in parameters.items()
            if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)
        }
        self.names = list(by_name)
        self.needed = [name for name, each in by_name.items() if each.default is each.empty]
        self.takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())

    def missing(self, given: Collection[str]) -> str | None:
        """An argument that it needs and is not given, if there is one."""
        return next((name for name in self.needed if name not in given), None)

    def chosen(
        self, given: Mapping[str, Any], if_named: Mapping[str, Any] = NOTHING
    ) -> dict[str, Any]:
        """Those of `given` that it takes, and those of `if_named` that it names."""
        taken = {n: each for n, each in given.items() if self.takes_all or n in self.names}
        return taken | {n: each for n, each in if_named.items() if n in self.names}

    def check_options(self, options: Collection[str], where: str, *, only: bool = False) -> None:
        """Look whether it takes these options, and, if it is given them `only`, needs no other.

        Raises:
            UserError: it does not; begins with `where`.
        """
        for option in options:
            if not self.takes_all and option not in self.names:
                raise UserError(f"{where}: takes no option {option!r}{nearest(option, self.names)}")
        if only and (name := self.missing(options)) is not None:
            raise UserError(f"{where}: needs the option {name!r}")
