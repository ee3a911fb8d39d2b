"""Prove from a run's log alone that laws 1, 2 and 5 of ARCHITECTURE.md held.

    python examples/audit_run.py RUN_DIR        # exit code 0: they held; 1: it says where not

Believes no view and no summary; docs/run-directory.md describes the tables that it compares.
"""

import json
import sqlite3
import sys
from collections import Counter, defaultdict
from types import SimpleNamespace

LOG = """SELECT kind, body FROM (SELECT seq AS event, 0 AS nr, kind, body FROM events
    UNION ALL SELECT event, seq, kind, body FROM commands)
    WHERE kind NOT IN ('Tick', 'Snapshot') ORDER BY event, nr"""  # an event, then what followed
SPANS = "SELECT group_id, member, MIN(version), MAX(version) FROM {} GROUP BY 1, 2"
PROOFS = "SELECT DISTINCT instance, version FROM {} WHERE steps > 0"  # not what was observed
TRAINED = "SELECT trained, group_id, member FROM trajectories WHERE trained IS NOT NULL"
wrong = []


def check(law, holds, *what):
    """Note what breaks a law."""
    if not holds:
        wrong.append(" ".join(map(str, (f"law {law}:", *what))))


def stored(db, query, *names):
    """Rows about tokens: of those that are there and those that were deleted (run.keep_tokens)."""
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    names = tables & set(names or ("segments", "pruned"))
    return [row for name in names for row in db.execute(query.format(name))]


def read(db):
    """Gather what the log says, in its order."""
    log = SimpleNamespace(published={}, proved=set(), v_traj={}, trained=[], is_over=False)
    log.ends, held = defaultdict(list), {}
    for kind, body in db.execute(LOG):
        e = json.loads(body)
        if kind in ("LearnerReady", "VersionPublished"):
            due = len(log.published) - (kind == "LearnerReady" and len(log.published) > 0)  # again
            has_weights = any(log.published.get(0, ()))  # a simulation has no checksums at all
            check(5, e["version"] == due and (e["checksum"] or not has_weights), "published:", body)
            log.published.setdefault(due, set()).add(e["checksum"])
        elif kind in ("InstanceJoined", "Pull", "Pulled"):
            held[e["instance"]] = max(e["version"], held.get(e["instance"], 0))
            if kind != "Pull":
                log.proved.add((e["instance"], e["version"], e["checksum"]))
        elif kind == "Route":
            check(1, e["version"] == held.get(e["instance"]), "not what it held:", body)
            log.v_traj.setdefault(tuple(e["trajectory"]), e["version"])
        elif kind == "Train":
            check(1, e["version"] == len(log.published) - 1, "not at the newest version:", body)
            for group, members in zip(e["groups"], e["members"], strict=True):
                log.trained += [(e["version"], (group, member)) for member in members]
                log.ends[group].append("consumed")
        elif kind == "Drop":
            log.ends[e["group"]].append(e["ending"])
        log.is_over = kind == "Finish" or (log.is_over and kind != "Route")  # it may be made longer
    return log


def law_1(db, log, bound):
    """Of each trajectory trained on, V_traj and its tokens' versions are within the bound."""
    spans = {(g, m): versions for g, m, *versions in stored(db, SPANS) if g >= 0}  # no suite's
    for one, (oldest, _) in spans.items():
        check(1, log.v_traj.get(one, oldest + 1) <= oldest, one, "has tokens older than V_traj")
    for batch, one in log.trained:
        versions = log.v_traj.get(one, batch + 1), *spans.get(one, [batch + 1])
        check(1, all(0 <= batch - v <= bound for v in versions), one, "in", batch, "has", versions)
    return f"{len(log.trained)} trajectories trained on, bound {bound}"


def law_2(db, log):
    """Every admitted group ended once, as the tables say, and no trajectory was trained twice."""
    said = dict(db.execute("SELECT group_id, ending FROM groups WHERE suite IS NULL"))
    admitted = {group for group, _ in log.v_traj}
    for group in {*said, *log.ends, *admitted}:
        ends, ending = log.ends[group], said.get(group)
        check(2, ends == [ending] * bool(ending), "group", group, "ended", ends, "not", ending)
        check(2, ends or not log.is_over or group not in admitted, "group", group, "was lost")
    counts = Counter((batch, (group, member)) for batch, group, member in db.execute(TRAINED))
    counts.subtract(log.trained)
    for (batch, one), count in counts.items():
        check(2, count == 0, one, "of batch", batch, "was not trained on exactly once")
    return f"{len(said)} groups: {dict(Counter(e for ends in log.ends.values() for e in ends))}"


def law_5(db, log):
    """Whatever generated a token had shown the checksum that the learner published."""
    last = None if log.is_over else len(log.published)  # killed before its publication was logged
    for instance, version, checksum in log.proved:
        due = log.published.get(version, {checksum} if version == last else {})
        check(5, checksum in due, instance, "has", checksum, "as version", version, "not", due)
    proved = {proof[:2] for proof in log.proved}
    for one in stored(db, PROOFS):
        check(5, one in proved, "tokens under a version that was not proved:", one)
    which = "proved" if any(log.published.get(0, ())) else "of no weights: it was simulated"
    return f"{len(log.published)} versions published, {len(proved)} pulls {which}"


if __name__ == "__main__":
    try:
        db = sqlite3.connect(f"file:{sys.argv[1]}/events.db?mode=ro", uri=True)
        ((config,),) = db.execute("SELECT config FROM attempts ORDER BY attempt DESC LIMIT 1")
        log, bound = read(db), json.loads(config)["schedule"]["max_staleness"]
        found = law_1(db, log, bound), law_2(db, log), law_5(db, log)
        gone = len(stored(db, SPANS, "pruned"))
    except (sqlite3.Error, ValueError, TypeError, LookupError, AttributeError) as error:
        sys.exit(f"{sys.argv[1]}: cannot be audited, is no log or is damaged: {error!r}")
    print("law 1: {} \nlaw 2: {} \nlaw 5: {}".format(*found))
    if gone:  # then their versions are believed, and that they are as many as the log says
        print(gone, "responses have no tokens any more: their versions are those noted before that")
    print(*wrong or ["all hold" if log.is_over else "all hold so far: it has not ended"], sep="\n")
    sys.exit(bool(wrong))
