"""Training data of the teacher of `distill`: right solutions of the demo's sums.

    rhymeflow sft distill --sft.output_dir DIRECTORY

begins with the demo's checkpoint, whose own teacher forgot every other carry."""

from __future__ import annotations

from typing import Any

from rhymeflow.recipes.demo import warm_start


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Draw `count` sums with their solutions, of the lengths that the demo's checkpoint learnt."""
    return warm_start.rows(count, seed, forgotten=0.0)
