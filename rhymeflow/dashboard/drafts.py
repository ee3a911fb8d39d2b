"""The view of drafts: what came of them by epoch, by position in a response, by prompt.

An iteration makes one token without any draft, so what is more was accepted; what an
environment answered does not count. Tokens count where they stand in the response, their iterations
where the token made without a draft does (`run.token_details`), or else as if the stretch of one
instance and version had been as quick all along; of the newest groups alone.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

from rhymeflow.dashboard.groups import summaries
from rhymeflow.dashboard.run import Run
from rhymeflow.observe.query import SHOWN_PROMPT, draft_figures, drafts_by_epoch

NEWEST = 500
"""Groups that positions are taken from."""
PROMPTS = 20
"""Prompts that are listed of the best, and of the worst."""

EDGES = (0, 16, 64, 256, 1024, 4096, 16384)
_STRETCHES = """SELECT start, LENGTH(tokens) / 4, steps, drafted, accepted FROM segments
        WHERE group_id > ?1 AND steps > 0
    UNION ALL SELECT start, length, steps, drafted, NULL FROM pruned
        WHERE group_id > ?1 AND steps > 0"""
_BY_PROMPT = f"""SELECT d.*,
    (SELECT SUBSTR(prompt, 1, {SHOWN_PROMPT}) FROM main.groups g
        WHERE g.row = d.row AND g.suite IS NULL ORDER BY group_id LIMIT 1)
    FROM (SELECT row, MAX(epoch), MAX(group_id), SUM(sampled) AS sampled, SUM(steps) AS steps,
        SUM(drafted) FROM temp.summaries WHERE steps > 0 AND epoch > 0 GROUP BY row
        ORDER BY 1.0 * SUM(sampled) / SUM(steps) {{0}}, row LIMIT {PROMPTS}) d
    ORDER BY 1.0 * sampled / steps {{0}}, d.row"""


def found(run: Run) -> dict[str, Any]:
    """Figures of drafts, each with `acceptance_length` (tokens for an iteration) and
    `acceptance_rate` (of drafted tokens; `None` where there were none)."""
    with summaries(run) as reader:
        epochs = drafts_by_epoch(reader, "SELECT * FROM temp.summaries")
        ((last,),) = reader.query("SELECT COALESCE(MAX(group_id), 0) FROM temp.summaries")
        positions = _by_position(reader.query(_STRETCHES, max(last - NEWEST, -1)))
        best, worst = (reader.query(_BY_PROMPT.format(order)) for order in ("DESC", "ASC"))
    return {
        "epochs": epochs,
        "positions": [{"from": start, **draft_figures(*sums)} for start, *sums in positions],
        "best": [_prompt(*row) for row in best],
        "worst": [_prompt(*row) for row in worst],
    }


def _by_position(stretches: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """From each of `EDGES` on that has any: tokens, their iterations, tokens drafted in them."""
    found = {edge: [0, 0.0, 0.0] for edge in EDGES}
    for start, length, steps, drafted, accepted in stretches:
        for low, high in pairwise((*EDGES, sys.maxsize)):
            first, last = max(low, start), min(high, start + length)
            if first < last:
                took = steps * (last - first) / length
                if accepted is not None:
                    took = accepted[first - start : last - start].count(0)
                for i, more in enumerate((last - first, took, drafted * took / steps)):
                    found[low][i] += more
    return [(edge, *sums) for edge, sums in found.items() if sums[0]]


def _prompt(
    row: int, epoch: int, group: int, sampled: int, steps: int, drafted: int, prompt: str
) -> dict[str, Any]:
    known = {"row": row, "prompt": prompt, "epoch": epoch, "group": group}
    return {**known, **draft_figures(sampled, steps, drafted)}
