"""The fault injector: its plans, its account, its finding of processes, and its cuts of a log; and
what `rhymeflow bench chaos_fake` reports of runs that are recorded (the runs: tests/fake_run)."""

import random
import shutil
import sqlite3
import threading
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

import pytest

from benchmarks import chaos_fake
from benchmarks.faults import processes, wal
from benchmarks.faults.messages import unreliable_pipe
from benchmarks.faults.plan import (
    DISK,
    PROCESSES,
    SECONDS,
    Account,
    Fault,
    draw_dense,
    draw_rates,
)  # fmt: skip
from rhymeflow.workers.channel import Channel


def test_a_seed_gives_one_plan_with_every_kind_equally_often():
    kinds = (*PROCESSES, DISK)
    plan = draw_dense(3, 120, 10, 10.0, kinds)
    assert plan == draw_dense(3, 120, 10, 10.0, kinds) != draw_dense(4, 120, 10, 10.0, kinds)
    assert Counter(fault.kind for fault in plan) == dict.fromkeys(kinds, 20)
    assert {fault.action for fault in plan if fault.kind == DISK} == {"full"}
    for action in ("stopped", "slowed"):
        seconds = [fault.seconds for fault in plan if fault.action == action]
        assert all(SECONDS[0] <= each <= SECONDS[1] for each in seconds)
        assert min(seconds) < 10 < max(seconds)
    cuts = [fault for fault in plan if fault.wal_bytes]
    assert cuts
    assert all(fault.label == "controller, killed, log cut" for fault in cuts)


def test_rates_give_each_period_its_kill():
    plan = draw_rates(0, 1200.0)
    assert [fault.delay for fault in plan] == sorted(fault.delay for fault in plan)
    assert {fault.action for fault in plan} == {"killed"}
    rollout = [fault.delay // 30 for fault in plan if fault.kind == "rollout"]
    assert rollout == list(range(40))
    core = [fault for fault in plan if fault.kind != "rollout"]
    assert [fault.delay // 120 for fault in core] == list(range(10))
    assert all(a.kind != b.kind for a, b in pairwise(core))


def test_a_fault_is_due_after_its_step_and_over_with_a_step_that_is_new():
    account = Account([Fault(2, 1.5, "learner")])
    account.trained([1], 10.0)
    assert account.due(100.0) is None
    account.trained([1, 2, 3], 20.0)
    assert account.due(21.4) is None
    assert account.due(21.5) == Fault(2, 1.5, "learner")
    one = account.inject(21.5)
    assert (one.after_step, account.due(100.0)) == (3, None)
    account.trained([1, 2, 3], 28.0)
    assert one.recovery is None, "what is trained again is no recovery"
    account.trained([1, 2, 3, 4], 30.0)
    account.trained([1, 2, 3, 4, 5], 32.0)
    assert one.recovery == 8.5
    assert account.is_over_all


def test_processes_are_found_by_kind_among_a_controllers():
    names = ["rhymeflow", "python", "rf:rollout-1", "rf:rollout-0.1", "rf:learner.2", "rf:reward"]
    family = [FakeProcess(30 - number, name) for number, name in enumerate(names)]
    found = {
        kind: [each.pid for each in processes.of_kind(family, kind)]  # type: ignore[arg-type]
        for kind in PROCESSES
    }
    assert found == {
        "controller": [30], "learner": [26], "rollout": [27, 28], "history": [], "reward": [25],
    }  # fmt: skip


class FakeProcess(NamedTuple):
    pid: int
    called: str

    def name(self) -> str:
        return self.called


@pytest.mark.parametrize("num_bytes", [1, 5000, 300_000, 10**9])
def test_only_what_was_written_since_the_last_copy_is_cut_off(tmp_path, num_bytes):
    """What SQLite had copied to the database stays, whatever is cut, and the file stays sound."""
    live, crashed = tmp_path / "live", tmp_path / "crashed"
    live.mkdir()
    writer = sqlite3.connect(live / "events.db", isolation_level=None)
    writer.execute("PRAGMA journal_mode = WAL")
    writer.execute("CREATE TABLE t (n INTEGER PRIMARY KEY, filler BLOB)")
    reader = sqlite3.connect(live / "events.db")
    for n in range(20):
        writer.execute("INSERT INTO t VALUES (?, randomblob(3000))", (n,))
    reader.execute("BEGIN")
    reader.execute("SELECT COUNT(*) FROM t").fetchone()  # so that the log is not begun anew
    writer.execute("PRAGMA wal_checkpoint(PASSIVE)")
    for n in range(20, 40):
        writer.execute("INSERT INTO t VALUES (?, randomblob(3000))", (n,))
    shutil.copytree(live, crashed)
    reader.close()
    writer.close()
    assert wal.cut(live / "events.db", num_bytes) == 0  # it was closed: there is no log
    assert 0 < wal.cut(crashed / "events.db", num_bytes) <= num_bytes
    after = sqlite3.connect(crashed / "events.db")
    assert after.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    rows = [n for (n,) in after.execute("SELECT n FROM t ORDER BY n")]
    after.close()
    assert rows == list(range(len(rows)))
    assert 20 <= len(rows) < 40
    assert num_bytes < 300_000 or len(rows) == 20


def test_messages_of_real_pipes_come_twice_and_late_and_arrive_whole_and_once():
    """The end of one side is heard after all that it said."""
    counts: Counter[str] = Counter()
    ours, theirs = unreliable_pipe(random.Random(0), lambda what, n: counts.update({what: n}))
    sent, heard = [b"%d" % number * (1 + number % 50) for number in range(300)], []

    def say() -> None:
        channel = Channel(ours)
        for message in sent:
            channel.send_bytes(message)
        ours.close()

    threading.Thread(target=say, daemon=True).start()
    with suppress(EOFError, ConnectionResetError):
        channel = Channel(theirs)
        while True:
            heard.append(channel.recv_bytes())
    assert heard == sent
    assert counts["twice"] > 1


def test_the_record_counts_all_runs_and_messages_apart():
    parts = [
        chaos_fake.Part(0, 3, {"disk full": 600, "messages twice": 900}, [], 2.0),
        chaos_fake.Part(3, 5, {"disk full": 100, "learner killed": 300}, ["seed 4, x: Y: z"], 2.0),
    ]
    violations, faults = chaos_fake.targets(parts)
    assert (violations.value, violations.met) == (1, False)
    assert (faults.value, faults.met) == (1000, False)
    assert chaos_fake.rows(parts)[0] == {"fault": "disk full", "times": 700}
    assert "8 runs, each schedule in turn, 1000 faults, 250 a second" in chaos_fake.notes(parts)
