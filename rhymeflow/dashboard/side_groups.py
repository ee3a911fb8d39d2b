"""The side index of a run's groups: their responses, their prompts, and sums over them.

Holds true: `flags` of a group has the bit of each of `FILTERS` that it fits; `tallies`,
`drafts_by_epoch` and `drafts_by_row` are the sums over `groups` that stand beside them, at every
moment, so no question goes through all groups for them. A prompt's text is there once for a row,
however many epochs took it. Prompts are never taken out; one that no group has is found by nobody.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3

from rhymeflow.store.reader import TrajectoryReader

FILTERS = {
    "right": "rewarded = responses AND reward_min = reward_max AND reward_mean >= 1",
    "wrong": "rewarded = responses AND reward_max <= 0",
    "mixed": "reward_max > reward_min",
    "cut": "cut > 0",
    "errors": "ending_reason IS NOT NULL",
    "open": "ending IS NULL",
    "consumed": "ending = 'consumed'",
    "filtered": "ending = 'filtered'",
    "aborted": "ending = 'aborted'",
}
"""By name, which groups may be asked for."""
FLAGS = {name: 1 << i for i, name in enumerate(FILTERS)}
"""By name, its bit."""
ENDINGS = ("open", "consumed", "filtered", "aborted")
"""Of which each group has one."""

ORDERS = {
    "order": "group_id",
    "spread": "spread",
    "reward": "reward_mean",
    "length": "length_max",
    "staleness": "staleness_max",
}
"""By name, the columns that groups are found in the order of: each has an index `groups_by_NAME`,
in which all that chooses among groups stands too."""

OF_COMPONENT = {
    "mixed": "most > least",
    "right": "least = most AND least >= 1",
    "wrong": "most <= 0",
}
"""By name, which groups may be asked for by one reward function's values."""

TABLES = """
CREATE TABLE side.components (name TEXT, group_id INTEGER, least REAL, most REAL,
    PRIMARY KEY (name, group_id)) WITHOUT ROWID;
CREATE INDEX side.components_by_group ON components (group_id);
CREATE TABLE side.component_names (name TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE side.responses (
    group_id INTEGER, member INTEGER, length INTEGER, observed INTEGER, first_version INTEGER,
    last_version INTEGER, steps INTEGER, drafted INTEGER, reason TEXT, reward REAL, step INTEGER,
    PRIMARY KEY (group_id, member)) WITHOUT ROWID;
CREATE TABLE side.prompts (id INTEGER PRIMARY KEY, row INTEGER, text TEXT);
CREATE INDEX side.prompts_by_row ON prompts (row);
CREATE TABLE side.groups (
    group_id INTEGER PRIMARY KEY, row INTEGER, epoch INTEGER, prompt INTEGER, ending TEXT,
    ending_version INTEGER, ending_reason TEXT, step INTEGER, responses INTEGER, rewarded INTEGER,
    cut INTEGER, reward_mean REAL, reward_min REAL, reward_max REAL, length_mean REAL,
    length_max INTEGER, staleness_max INTEGER, sampled INTEGER, steps INTEGER, drafted INTEGER,
    spread REAL, flags INTEGER);
CREATE INDEX side.groups_by_step ON groups (step, group_id);
CREATE INDEX side.groups_by_row ON groups (row, epoch);
CREATE INDEX side.groups_by_prompt ON groups (prompt);
CREATE TABLE side.tallies (flags INTEGER PRIMARY KEY, groups INTEGER);
CREATE TABLE side.drafts_by_epoch (epoch INTEGER PRIMARY KEY, sampled INTEGER, steps INTEGER,
    drafted INTEGER);
CREATE TABLE side.drafts_by_row (row INTEGER PRIMARY KEY, sampled INTEGER, steps INTEGER,
    drafted INTEGER);
CREATE INDEX side.drafts_by_acceptance ON drafts_by_row (1.0 * sampled / steps, row);""" + "".join(
    f"CREATE INDEX side.groups_by_{name} ON groups ({column}, group_id, flags, prompt);"
    for name, column in ORDERS.items()
    if name != "order"
)
TABLES += "CREATE INDEX side.groups_by_order ON groups (group_id, flags, prompt);"

WORDS = """CREATE VIRTUAL TABLE side.prompt_words
    USING fts5(text, content='', tokenize='trigram', detail=none)"""
"""Which prompts have three letters in a row, whatever their case: candidates for a longer text."""

_SHOWN_PROMPT = 2_000
"""Characters of a prompt that are kept for searching."""
_TEXT = f"SUBSTR(g.prompt, 1, {_SHOWN_PROMPT})"

# `step` counts from 1, as people and metrics do; `trained` of the store from 0.
_RESPONSES = """
INSERT INTO side.responses
SELECT p.group_id, p.member, SUM(p.length), SUM(p.length * (p.steps = 0)), MIN(p.version),
    MAX(p.version), SUM(p.steps), SUM(p.drafted), t.reason, t.reward, t.trained + 1
FROM (SELECT group_id, member, LENGTH(tokens) / 4 AS length, version, steps, drafted FROM segments
        WHERE group_id {those}
    UNION ALL SELECT group_id, member, length, version, steps, drafted FROM pruned
        WHERE group_id {those}) p
LEFT JOIN trajectories t ON t.group_id = p.group_id AND t.member = p.member
GROUP BY p.group_id, p.member"""
_PROMPTS = f"""
INSERT INTO side.prompts (row, text) SELECT DISTINCT g.row, {_TEXT}
FROM main.groups g WHERE g.group_id {{those}}
AND NOT EXISTS (SELECT 1 FROM side.prompts p WHERE p.row = g.row AND p.text = {_TEXT})"""
# Of one function alone the reward says all; an object of several has a comma.
_COMPONENTS = """
INSERT INTO side.components SELECT j.key, t.group_id, MIN(j.value), MAX(j.value)
FROM trajectories t, json_each(t.components) j
WHERE t.group_id {those} AND t.components LIKE '%,%' GROUP BY 1, 2"""
_COMPONENT_NAMES = """INSERT OR IGNORE INTO side.component_names
SELECT DISTINCT name FROM side.components WHERE group_id {those}"""
_BITS = " | ".join(f"(COALESCE({each}, 0) << {i})" for i, each in enumerate(FILTERS.values()))
_GROUPS = f"""
INSERT INTO side.groups
SELECT *, reward_max - reward_min, {_BITS} FROM (
    SELECT g.group_id, g.row, g.epoch,
        (SELECT id FROM side.prompts p WHERE p.row = g.row AND p.text = {_TEXT}),
        g.ending, g.ending_version, g.ending_reason,
        CASE WHEN g.ending = 'consumed' THEN g.ending_version + 1 END,
        COUNT(r.member) AS responses, COUNT(r.reward) AS rewarded,
        TOTAL(r.reason IN ('length', 'finished_early')) AS cut, AVG(r.reward) AS reward_mean,
        MIN(r.reward) AS reward_min, MAX(r.reward) AS reward_max, AVG(r.length), MAX(r.length),
        MAX(r.step - 1 - r.first_version), SUM(r.length - r.observed), SUM(r.steps), SUM(r.drafted)
    FROM main.groups g LEFT JOIN side.responses r USING (group_id)
    WHERE g.group_id {{those}} GROUP BY g.group_id)"""
_SUMS = (
    """INSERT INTO side.tallies SELECT flags, {sign} * COUNT(*) FROM side.groups
    WHERE group_id {those} GROUP BY flags
    ON CONFLICT DO UPDATE SET groups = groups + excluded.groups""",
    """INSERT INTO side.drafts_by_epoch
    SELECT epoch, {sign} * SUM(sampled), {sign} * SUM(steps), {sign} * SUM(drafted)
    FROM side.groups WHERE group_id {those} AND steps > 0 GROUP BY epoch
    ON CONFLICT DO UPDATE SET sampled = sampled + excluded.sampled, steps = steps + excluded.steps,
    drafted = drafted + excluded.drafted""",
    """INSERT INTO side.drafts_by_row
    SELECT row, {sign} * SUM(sampled), {sign} * SUM(steps), {sign} * SUM(drafted)
    FROM side.groups WHERE group_id {those} AND steps > 0 AND epoch > 0 GROUP BY row
    ON CONFLICT DO UPDATE SET sampled = sampled + excluded.sampled, steps = steps + excluded.steps,
    drafted = drafted + excluded.drafted""",
)


def put(reader: TrajectoryReader, those: str) -> None:
    """Look again at the groups whose number is as `those` says; within a transaction."""
    for statement in _SUMS:
        reader.query(statement.format(those=those, sign=-1))
    for table in ("components", "responses", "groups"):
        reader.query(f"DELETE FROM side.{table} WHERE group_id {those}")
    for statement in (_COMPONENTS, _COMPONENT_NAMES, _RESPONSES):
        reader.query(statement.format(those=those))
    ((last,),) = reader.query("SELECT COALESCE(MAX(id), 0) FROM side.prompts")
    reader.query(_PROMPTS.format(those=those))
    if has_words(reader):
        reader.query(
            "INSERT INTO side.prompt_words (rowid, text)"
            " SELECT id, text FROM side.prompts WHERE id > ?",
            last,
        )
    reader.query(_GROUPS.format(those=those))
    for statement in _SUMS:
        reader.query(statement.format(those=those, sign=1))


def component_names(reader: TrajectoryReader) -> list[str]:
    """Reward functions, and environments that reward, of a run with several."""
    return [name for (name,) in reader.query("SELECT name FROM side.component_names ORDER BY 1")]


def tallies(reader: TrajectoryReader) -> dict[int, int]:
    """How many groups have exactly these flags."""
    return dict(reader.query("SELECT flags, groups FROM side.tallies WHERE groups > 0"))


def endings(reader: TrajectoryReader) -> dict[str, int]:
    """How many groups ended in each way, or are `open`."""
    found = tallies(reader)
    sums = {e: sum(n for flags, n in found.items() if flags & FLAGS[e]) for e in ENDINGS}
    return {ending: count for ending, count in sums.items() if count}


@functools.cache
def can_have_words() -> bool:
    """Whether this SQLite can look for three letters in a row."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        options = connection.execute("PRAGMA compile_options").fetchall()
    return ("ENABLE_FTS5",) in options and sqlite3.sqlite_version_info >= (3, 34)


def has_words(reader: TrajectoryReader) -> bool:
    """Whether the side index has `prompt_words`."""
    return bool(reader.query("SELECT 1 FROM side.sqlite_master WHERE name = 'prompt_words'"))


def match_prompts(reader: TrajectoryReader, text: str) -> int:
    """Make the table `temp.matched` of prompts that have the text, whatever the case of letters
    without accents; return how many they are."""
    reader.query("CREATE TEMP TABLE matched (id INTEGER PRIMARY KEY)")
    where, values = "text LIKE ? ESCAPE '\\'", [like(text)]
    if (words := candidates(text)) and has_words(reader):
        where += " AND id IN (SELECT rowid FROM side.prompt_words WHERE prompt_words MATCH ?)"
        values.append(words)
    reader.query(f"INSERT INTO temp.matched SELECT id FROM side.prompts WHERE {where}", *values)
    ((count,),) = reader.query("SELECT COUNT(*) FROM temp.matched")
    return int(count)


_THREES = 8
"""Of a text, that are looked up; of a longer one they lie apart."""


def candidates(text: str) -> str:
    """A question to `prompt_words` that every prompt with the text fits; '': all do."""
    count = len(text) - 2
    if count < 1 or "\0" in text:
        return ""
    places = sorted({i * (count - 1) // _THREES for i in range(_THREES + 1)})
    threes = [text[place : place + 3].replace('"', '""') for place in places]
    return " AND ".join(f'"{each}"' for each in dict.fromkeys(threes))


def like(text: str) -> str:
    """The pattern of what has the text, with the escape character '\\'."""
    return "%" + text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"


__all__ = [
    "FILTERS", "FLAGS", "OF_COMPONENT", "ORDERS", "TABLES", "WORDS", "can_have_words",
    "component_names", "endings", "has_words", "like", "match_prompts", "put", "tallies",
]  # fmt: skip
