"""The view of drafts: what came of them by epoch, by position in a response, by prompt.

Holds true: an iteration makes one token without any draft, so what is more was accepted; what an
environment answered does not count. Positions are those at which stretches of one instance and
version began, of the newest groups alone.
"""

from __future__ import annotations

from typing import Any

from rhymeflow.dashboard.run import Run

NEWEST = 500
"""Groups that positions are taken from."""
PROMPTS = 20
"""Prompts that are listed of the best, and of the worst."""

_BY_EPOCH = """SELECT epoch, sampled, steps, drafted FROM side.drafts_by_epoch WHERE steps > 0
    ORDER BY epoch"""
_BY_POSITION = """SELECT bin, SUM(length), SUM(steps), SUM(drafted) FROM
    (SELECT length, steps, drafted, CASE WHEN start < 16 THEN 0 WHEN start < 64 THEN 16
        WHEN start < 256 THEN 64 WHEN start < 1024 THEN 256 WHEN start < 4096 THEN 1024
        WHEN start < 16384 THEN 4096 ELSE 16384 END AS bin
    FROM (SELECT start, LENGTH(tokens) / 4 AS length, steps, drafted FROM segments
            WHERE group_id > ?1 AND steps > 0
        UNION ALL SELECT start, length, steps, drafted FROM pruned
            WHERE group_id > ?1 AND steps > 0))
    GROUP BY bin ORDER BY bin"""
_THESE = "FROM side.groups g WHERE g.row = d.row AND g.steps > 0 AND g.epoch > 0"
_BY_PROMPT = f"""SELECT d.row, sampled, steps, drafted,
    (SELECT SUBSTR(p.text, 1, 200) FROM side.prompts p WHERE p.row = d.row ORDER BY id LIMIT 1),
    (SELECT MAX(epoch) {_THESE}), (SELECT MAX(group_id) {_THESE})
    FROM (SELECT * FROM side.drafts_by_row WHERE steps > 0
        ORDER BY 1.0 * sampled / steps {{0}}, row LIMIT {PROMPTS}) d
    ORDER BY 1.0 * sampled / steps {{0}}, d.row"""


def found(run: Run) -> dict[str, Any]:
    """Figures of drafts, each with `acceptance_length` (tokens for an iteration) and
    `acceptance_rate` (of drafted tokens; `None` where there were none)."""
    with run.reader() as reader:
        epochs = reader.query(_BY_EPOCH)
        ((last,),) = reader.query("SELECT COALESCE(MAX(group_id), 0) FROM side.groups")
        positions = reader.query(_BY_POSITION, last - NEWEST)
        best, worst = (reader.query(_BY_PROMPT.format(order)) for order in ("DESC", "ASC"))
    return {
        "epochs": [{"epoch": epoch, **_figures(*sums)} for epoch, *sums in epochs],
        "positions": [{"from": start, **_figures(*sums)} for start, *sums in positions],
        "best": [_prompt(*row) for row in best],
        "worst": [_prompt(*row) for row in worst],
    }


def _prompt(
    row: int, sampled: int, steps: int, drafted: int, prompt: str, epoch: int, group: int
) -> dict[str, Any]:
    known = {"row": row, "prompt": prompt, "epoch": epoch, "group": group}
    return {**known, **_figures(sampled, steps, drafted)}


def _figures(sampled: int, steps: int, drafted: int) -> dict[str, Any]:
    return {
        "tokens": sampled,
        "drafted": drafted,
        "acceptance_length": sampled / steps,
        "acceptance_rate": (sampled - steps) / drafted if drafted else None,
    }


__all__ = ["found"]
