"""Colours of tokens: what each of a response's tokens is told by, in a few levels with a legend.

Holds true: the levels of a colouring go from the least worth a look to the most, or from one end to
the other, and each has words; a token of which the thing is not known has no level. Where there are
no colours, stretches of tokens of one level are listed with its words, so nothing is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rhymeflow.errors import UserError, nearest
from rhymeflow.observe.fitted import Packed
from rhymeflow.observe.printable import printable
from rhymeflow.observe.tokens import Token

CLIPPED, CAPPED, MASKED = 1, 2, 4


class Level(NamedTuple):
    """Words, and how tokens look."""

    words: str
    style: str


@dataclass(frozen=True)
class Colouring:
    """A way to colour tokens."""

    title: str
    levels: Sequence[Level]
    level: Callable[[Token], int | None]
    """Number of a token's level."""
    needs: str
    """What is missing where no token has a level."""


_UNKNOWN = Level("not known", "dim")
_OBSERVED = Level("environment", "italic dim")
_HEAT = ("", "black on color(229)", "black on color(221)", "black on color(209)")
_HOTTEST = "bold white on color(160)"
_DIVERGING = (
    *("bold white on color(160)", "black on color(217)", ""),
    *("black on color(153)", "bold white on color(26)"),
)
_OTHER_VERSIONS = (
    *("black on color(153)", "black on color(229)", "black on color(157)"),
    *("black on color(217)", "black on color(183)", "black on color(223)"),
)

_PROBABILITIES = (0.9, 0.5, 0.1, 0.01)
_PROBABILITY_WORDS = ("0.9 or more", "0.5 to 0.9", "0.1 to 0.5", "0.01 to 0.1", "below 0.01")
_DIFFERENCES = (-0.5, -0.05, 0.05, 0.5)
_DIFFERENCE_WORDS = (
    *("0.5 or more lower", "0.05 to 0.5 lower", "within 0.05"),
    *("0.05 to 0.5 higher", "0.5 or more higher"),
)
_DETAILS = "it needs run.token_details"


def _logprob(tokens: Sequence[Token]) -> Colouring:
    def level(token: Token) -> int | None:
        if token.logprob is None:
            return None
        return sum(token.logprob < math.log(bound) for bound in _PROBABILITIES)

    styles = (*_HEAT, _HOTTEST)
    levels = [Level(*each) for each in zip(_PROBABILITY_WORDS, styles, strict=True)]
    return Colouring("Probability when sampled", levels, level, "no token was sampled")


def _difference(tokens: Sequence[Token]) -> Colouring:
    def level(token: Token) -> int | None:
        if token.logprob is None or token.learner is None:
            return None
        difference = token.learner - token.logprob
        # The outer bounds belong to the outer levels, the inner ones to the one in the middle.
        low, lower, upper, high = _DIFFERENCES
        return sum((difference > low, difference >= lower, difference > upper, difference >= high))

    levels = [Level(*each) for each in zip(_DIFFERENCE_WORDS, _DIVERGING, strict=True)]
    needs = f"{_DETAILS}, and a response that was trained on and not masked"
    title = "Log-probability, the learner's against the sampler's, in nats"
    return Colouring(title, levels, level, needs)


def _version(tokens: Sequence[Token]) -> Colouring:
    versions = sorted({token.version for token in tokens if not token.is_observed})
    styles = ["", *(_OTHER_VERSIONS[i % len(_OTHER_VERSIONS)] for i in range(len(versions)))]
    levels = [
        Level(f"version {each}", style) for each, style in zip(versions, styles, strict=False)
    ]
    numbers = {version: number for number, version in enumerate(versions)}
    return Colouring(
        "Version that sampled",
        levels,
        lambda token: None if token.is_observed else numbers[token.version],
        "no token was sampled",
    )


def _drafts(tokens: Sequence[Token]) -> Colouring:
    levels = (Level("sampled alone", ""), Level("drafted and accepted", "black on color(157)"))
    return Colouring(
        "Drafts",
        levels,
        lambda token: None if token.accepted is None else int(token.accepted),
        _DETAILS,
    )


def _loss(tokens: Sequence[Token]) -> Colouring:
    def level(token: Token) -> int | None:
        if token.flags is None:
            return None
        if token.flags & MASKED:
            return 4
        return (token.flags & CLIPPED > 0) + 2 * (token.flags & CAPPED > 0)

    levels = (
        Level("in the loss", ""),
        Level("clipped", "black on color(221)"),
        Level("capped", "black on color(153)"),
        Level("clipped and capped", "black on color(209)"),
        Level("masked", "white on color(240)"),
    )
    return Colouring("Loss", levels, level, f"{_DETAILS}, and a response that was trained on")


COLOURINGS: dict[str, Callable[[Sequence[Token]], Colouring]] = {
    "logprob": _logprob,
    "difference": _difference,
    "version": _version,
    "drafts": _drafts,
    "loss": _loss,
}
"""By name, what makes a colouring of a response's tokens."""


def check(name: str) -> None:
    """Raise `UserError` if there is no such colouring."""
    if name not in COLOURINGS:
        raise UserError(f"--colour {name}: there is no such colouring{nearest(name, COLOURINGS)}")


def coloured(name: str, tokens: Sequence[Token], console: Console) -> RenderableType:
    """The tokens with their legend, in colours where the console has them.

    Raises:
        UserError: what the colouring shows is known of no token.
    """
    check(name)
    colouring = COLOURINGS[name](tokens)
    found = [_level(token, colouring) for token in tokens]
    if all(token_level in (_UNKNOWN, _OBSERVED) for token_level in found):
        raise UserError(f"--colour {name}: there is nothing to show: {colouring.needs}")
    used = [each for each in (*colouring.levels, _OBSERVED, _UNKNOWN) if each in found]
    title = Text(f"{colouring.title}:")
    if console.color_system is None or console.no_color:
        return Group(title, _listed(tokens, found))
    legend = Packed([Text(f"\u00a0{each.words}\u00a0", style=each.style) for each in used], " ")
    text = Text()
    for token, level in zip(tokens, found, strict=True):
        text.append(_visible(token.text), style=level.style)
    return Group(title, legend, text)


def _level(token: Token, colouring: Colouring) -> Level:
    if (number := colouring.level(token)) is not None:
        return colouring.levels[number]
    return _OBSERVED if token.is_observed else _UNKNOWN


def _listed(tokens: Sequence[Token], levels: Sequence[Level]) -> Table:
    """A row for each stretch of tokens of one level."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    pairs = zip(tokens, levels, strict=True)
    for level, part in groupby(pairs, key=lambda pair: pair[1]):
        those = [token for token, _ in part]
        first, last = those[0].position, those[-1].position
        where = f"{first}" if first == last else f"{first}-{last}"
        text = "".join(_visible(each.text) for each in those)
        table.add_row(where, level.words, Text(text.removesuffix("\n")))
    return table


def _visible(text: str) -> str:
    """Nothing of it acts on the terminal, and what would not be seen is."""
    return printable(text.replace("\t", "⇥")).replace("\n", "⏎\n")


__all__ = ["COLOURINGS", "Colouring", "Level", "check", "coloured"]
