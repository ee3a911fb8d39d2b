"""Section `drafting`: speculative decoding from history."""

from __future__ import annotations

from typing import Literal

from rhymeflow.config.section import Positive, Section


class DraftingConfig(Section):
    """Speculative decoding from history: what a prompt's earlier responses said is proposed, and
    the policy verifies it. What is sampled stays the same token for token."""

    window: Literal["off", "aimd", "cost"] = "cost"
    """How many tokens are drafted. `aimd`: two more after a draft that was accepted whole, back to
    two after a rejection (RhymeRL). `cost`: as many, and for those responses, as make the most
    accepted tokens a second by the iteration times the engine measures; none where drafts do not
    pay. `off`: no drafts."""
    max_draft: Positive = 16
    """Most tokens drafted for one response in one iteration."""
    shape: Literal["linear", "tree"] = "linear"
    """`tree` drafts several continuations at once where history disagrees."""
    ranking: Literal["reward", "frequency", "combined"] = "combined"
    """What makes one continuation likelier than another: the rewards of the responses it comes
    from, how many of them there are, or both."""
    history_tokens: Positive = 4_000_000
    """Tokens of history that are kept; the oldest go first."""
    history_run: str | None = None
    """Run directory of a previous run to begin the history with."""

    @property
    def history_responses(self) -> int:
        """Responses that are kept: of 64 tokens and more, as many as `history_tokens` holds."""
        return -(-self.history_tokens // 64)
