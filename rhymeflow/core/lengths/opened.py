"""A group whose lengths are still to come: what is known of it so far."""

from __future__ import annotations

from rhymeflow.core.lengths.outlook import Past, Standing


class OpenGroup:
    """What the history keeps of a group from when it is drawn until it ends."""

    __slots__ = (
        "base", "curve", "edition", "epoch", "guess", "high", "lengths", "low", "past", "prompt",
        "rewards", "total",
    )  # fmt: skip

    def __init__(self, prompt: int, epoch: int, past: Past | None) -> None:
        self.prompt, self.epoch, self.past = prompt, epoch, past
        self.lengths: dict[int, int] = {}
        """Of the members that have finished."""
        self.rewards: dict[int, float] = {}
        """Of those that are judged."""
        self.total = 0.0
        """Sum of the logarithms of the lengths."""
        self.edition = -1
        """Of the predictions that the curve is made from."""
        self.curve: list[float] = []
        """Expectations at the marks, as far as they were asked for."""
        self.base = self.guess = self.low = self.high = 0.0
        """Foretold at opening, as logarithms: for any prompt, for this one; 80% interval."""

    @property
    def standing(self) -> Standing:
        """What predictions know of it."""
        return Standing(self.past, len(self.lengths), self.total)
