"""The SQL statements that a store's writer executes."""

from __future__ import annotations

from enum import StrEnum


class Statement(StrEnum):
    """Statements that write rows, in the order in which a transaction executes them: an INSERT
    comes before the UPDATE of the same row. An UPDATE must find its row."""

    ATTEMPT = "INSERT INTO attempts VALUES (?, ?, ?, ?, ?)"
    CONFIG = "UPDATE attempts SET config = ? WHERE attempt = ?"
    GROUP = """INSERT INTO groups
        (group_id, row, epoch, prompt, prompt_tokens, columns, suite, evaluates)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"""
    SEGMENT = """INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
        ON CONFLICT DO UPDATE SET version = excluded.version, instance = excluded.instance,
        steps = excluded.steps, drafted = excluded.drafted,
        tokens = excluded.tokens, logprobs = excluded.logprobs, accepted = excluded.accepted
        WHERE length(excluded.tokens) > length(tokens)"""
    SPAN = "INSERT OR REPLACE INTO pruned VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
    FINISHED = """INSERT INTO trajectories (group_id, member, length, reason)
        VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE
        SET length = excluded.length, reason = excluded.reason"""
    TEXT = "UPDATE trajectories SET text = ? WHERE group_id = ? AND member = ?"
    REWARD = "UPDATE trajectories SET reward = ?, components = ? WHERE group_id = ? AND member = ?"
    TRAINED = "UPDATE trajectories SET trained = ? WHERE group_id = ? AND member = ?"
    ENDING = """UPDATE groups SET ending = ?, ending_version = ?, ending_reason = ?
        WHERE group_id = ?"""
    TOKEN_DETAILS = "INSERT OR REPLACE INTO token_details VALUES (?, ?, ?, ?)"
    EVENT = "INSERT INTO events VALUES (?, ?, ?, ?)"
    COMMAND = "INSERT INTO commands VALUES (?, ?, ?, ?)"
    SNAPSHOT = "INSERT OR REPLACE INTO snapshots VALUES (?, ?)"
    OLD_SNAPSHOTS = "DELETE FROM snapshots WHERE event < ?"
    CHANGE = "INSERT INTO changes (what, a, b) VALUES (?, ?, ?)"


_WANTED = "group_id IN (SELECT value FROM json_each(?))"
PROMPTS_OF = f"SELECT group_id, row, epoch, prompt, prompt_tokens FROM groups WHERE {_WANTED}"
TOKENS_OF = f"""SELECT group_id, member, tokens, version, steps = 0
    FROM segments WHERE {_WANTED}
    ORDER BY group_id, member, start"""
FINISHED_OF = f"SELECT group_id, member, reason FROM trajectories WHERE {_WANTED}"
