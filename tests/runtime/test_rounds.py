"""Rounds of events are short where little is to be done in them."""

from __future__ import annotations

import pytest

from rhymeflow.runtime.controller import (
    LONGEST_ROUND_SECONDS,
    ROUND_SECONDS,
    ROUND_SHARE,
    round_seconds,
)


def test_a_round_is_as_long_as_its_work_asks_for_within_limits() -> None:
    assert round_seconds(0.0) == round_seconds(ROUND_SECONDS * ROUND_SHARE / 2) == ROUND_SECONDS
    assert round_seconds(0.004) == pytest.approx(0.004 / ROUND_SHARE)
    assert round_seconds(5.0) == LONGEST_ROUND_SECONDS
