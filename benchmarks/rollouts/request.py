"""What an engine is asked for by a message to `peers/vllm_driver.py`. Loads no engine."""

from __future__ import annotations

from typing import Any

from rhymeflow.engine.base import NoiseKey, Request, Sampling


def requests_of(request: dict[str, Any]) -> list[Request]:
    """One request for each of its prompts."""
    return [
        Request(
            i,
            prompt,
            NoiseKey(1000 + row, request["noise_epoch"], sample),
            Sampling(request["temperature"], 1.0, 0, length, frozenset()),
        )
        for i, (prompt, length, (row, sample)) in enumerate(
            zip(request["prompts"], request["lengths"], request["names"], strict=True)
        )
    ]
