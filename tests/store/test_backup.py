"""A backup: a run that is rebuilt from it is the run, and what is not whole is not taken for it."""

import itertools
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.core.types import TrajectoryId
from rhymeflow.observe.summary import backup_line
from rhymeflow.store import backup as backups
from rhymeflow.store.backup import BackupThread, check_free, copied, restore
from rhymeflow.store.checkpoint_dirs import CheckpointPlace
from rhymeflow.utils import shared_memory
from rhymeflow.utils.child import descendants
from tests.processes import Command
from tests.refused import refusal
from tests.runtime.logs import audit, tokens
from tests.runtime.test_resume import SYNCHRONOUS, learned, small
from tests.runtime.tiny import file_of, published, until
from tests.store.made_up import MadeUpRun
from tests.store.stores import segment

NAMES = (f"flaky://backup-{n}" for n in itertools.count())
TABLES = (
    *("events", "commands", "attempts", "groups", "trajectories", "token_details", "pruned"),
    *("changes", "meta", "snapshots"),
)


class FlakyFileSystem(MemoryFileSystem):
    """Fails, before or after it has written all or a part, as often as `share` says."""

    protocol = "flaky"
    share, rng = 0.0, random.Random(0)

    def pipe_file(self, path, value, mode="overwrite", **options):
        fails, size = self.rng.random() < self.share, self.rng.choice([0, 0.5, 1])
        how = self.rng.choice(["never", "silently", "loudly"]) if fails else "well"
        if how != "never":
            super().pipe_file(path, value[: int(size * len(value))] if fails else value, mode)
        if how in ("never", "loudly"):
            raise ConnectionError("the network is gone")

    def put_file(self, source, path, **options):
        self.pipe_file(path, Path(source).read_bytes())


register_implementation("flaky", FlakyFileSystem, clobber=True)


def content(path: Path) -> dict[str, list]:
    """All that is in a store, and its metrics."""
    with closing(sqlite3.connect(path / "events.db")) as db:
        found = {t: sorted(db.execute(f"SELECT * FROM {t}"), key=repr) for t in TABLES}
        found["segments"] = sorted(db.execute("SELECT rowid, * FROM segments"))
    found["snapshots"] = [max(found["snapshots"], default=None)]
    found["metrics"] = (path / "metrics.jsonl").read_text().splitlines()
    return found


def until_copied(run: MadeUpRun) -> None:
    until(lambda: copied(run.path) and copied(run.path).event == run.store._last_seq)


def started(run: MadeUpRun, url: str) -> BackupThread:
    thread = BackupThread(run.path, url)
    thread.start()
    return thread


def back_up(run: MadeUpRun, url: str) -> None:
    """As an attempt of its own."""
    thread = started(run, url)
    thread.close()
    assert thread.notice() is None
    assert copied(run.path).event == run.store._last_seq


def files(url: str) -> list[str]:
    return sorted(backups.BackupStorage(url)._fs.find(backups.BackupStorage(url)._root))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(backups, "RETRY_SECONDS", (0.01, 0.02))
    yield
    FlakyFileSystem.share = 0.0


@pytest.fixture
def url():
    return next(NAMES)


@pytest.fixture
def run(tmp_path):
    run = MadeUpRun(tmp_path / "run")
    yield run
    run.store.close()


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    acts=st.lists(st.sampled_from(["on", "back up", "resume", "move"]), min_size=3, max_size=14),
    share=st.sampled_from([None, 0.0, 0.2, 0.5]),
)
def test_whatever_fails_the_backup_comes_to_have_all(tmp_path_factory, seed, acts, share):
    """Errors, writes cut short, attempts that follow one another here and elsewhere; None: in a
    directory."""
    folder = tmp_path_factory.mktemp("runs")
    url, share = (str(folder / "backup"), 0.0) if share is None else (next(NAMES), share)
    FlakyFileSystem.rng, FlakyFileSystem.share = random.Random(seed), share
    run, number = MadeUpRun(folder / "run", seed), 0
    run.step()
    thread = started(run, url)
    for act in [*acts, "move"]:
        if act == "on":
            run.go_on(4, prunes=seed % 2 == 0)
        elif act == "back up":
            run.save()
            thread.saved(run.checkpoint)
        else:
            run.save()
            FlakyFileSystem.share = 0.0
            thread.close()
            if act == "move" and run.checkpoint:
                number += 1
                run.store.close()
                path, said = restore(url, folder / str(number))
                told = f"the log up to event {run.store._last_seq:,}, version {run.version}"
                assert said == [f"{url}: {told}"]
                assert content(path) == content(run.path)
                (newest,) = (path / "checkpoints").iterdir()
                assert newest.name == f"step-{run.checkpoint}"
                for file in filter(Path.is_file, [*newest.rglob("*"), path / "config.yaml"]):
                    original = run.path / file.relative_to(path)
                    assert file.read_bytes() == original.read_bytes()
                run.path = path
            else:
                run.store.close()
            run.begin()
            FlakyFileSystem.share = share
            thread = started(run, url)
    FlakyFileSystem.share = 0.0
    thread.close()
    run.store.close()
    # A try that failed may have left an older one in the folder of the backup that succeeded.
    folders = {name.rsplit("/", 3)[0] for name in files(url) if name.endswith("/model")}
    kept = Counter(folder.rpartition("/")[0] for folder in folders)
    assert max(kept.values()) <= backups.KEPT_CHECKPOINTS, "checkpoints of an attempt"


@pytest.mark.parametrize("kind", ["rows", "marker", "checkpoint"])
@pytest.mark.parametrize("how", ["cut", "changed", "missing"])
def test_what_is_not_whole_is_left_out_and_said(run, url, tmp_path, kind, how):
    states = []
    for _ in range(4):
        run.go_on(4)
        run.save()
        back_up(run, url)
        states.append(content(run.path))
    ends = {"rows": ".db", "marker": "/backup.json", "checkpoint": "/model"}[kind]
    chosen = [path for path in files(url) if path.endswith(ends)][2 if kind == "rows" else -1]
    fs = backups.BackupStorage(url)._fs
    data = fs.cat_file(chosen)
    if how == "missing":
        fs.rm(chosen)
    else:
        fs.pipe_file(chosen, data[:-3] if how == "cut" else data[:-3] + b"abc")
    _, said = restore(url, tmp_path / "new")
    assert "left out" in said[1]
    assert content(tmp_path / "new") == states[1 if kind == "rows" else 2]


def test_checkpoints_elsewhere_stay_while_a_backup_names_them(run, url, tmp_path):
    """From before it is made: the run may delete others at any moment."""
    place = (tmp_path / "place").as_uri()
    storage = backups.Storage(place, "run.checkpoint_dir")

    def step(*threads):
        before = run.version
        while run.version == before:
            run._generate()
            run._train()
        run.store.commit()
        storage.write(f"step-{run.version}/complete.json", {})
        for thread in threads:
            thread.saved(run.version)
        return run.version

    first = step()
    (run.path / "checkpoints").write_text(place)
    thread = started(run, url)
    assert first in thread.needed, "until it is known what the last attempt's backup names"
    until_copied(run)
    FlakyFileSystem.share, FlakyFileSystem.rng = 1.0, random.Random(1)
    second = step(thread)
    until(lambda: thread.notice())
    assert thread.needed == {first, second}
    FlakyFileSystem.share = 0.0
    until_copied(run)
    third = step(thread)
    assert third in thread.needed
    thread.close()
    assert thread.needed == {second, third}
    assert not [name for name in files(url) if "/checkpoints/" in name]
    (newest, _), *_ = [pair for pair in thread._storage.backups([thread._attempt])]
    assert thread._storage.get(f"{newest}/backup.json", backups.Backup).version == third


def test_an_attempt_keeps_two_checkpoints_to_its_end(run, url, tmp_path):
    thread, states = started(run, url), []
    for _ in range(3):
        run.step()
        thread.saved(run.checkpoint)
        until_copied(run)
        states.append(content(run.path))
    run._generate()
    run.store.commit()
    thread.close()
    _, newest = [path for path in files(url) if path.endswith("/model")]
    backups.BackupStorage(url)._fs.pipe_file(newest, b"cut")
    restore(url, tmp_path / "new")
    assert content(tmp_path / "new") == states[1]


def test_an_attempt_that_was_taken_for_dead_does_no_harm(run, url, tmp_path):
    run.go_on(12)
    run.save()
    stale = started(run, url)
    until_copied(run)
    restore(url, tmp_path / "new")
    heir = MadeUpRun.__new__(MadeUpRun)
    heir.__dict__ |= {**run.__dict__, "path": tmp_path / "new", "open": dict(run.open)}
    heir.begin()
    for _ in range(3):  # it is not dead
        run.go_on(6)
        run.step()
        stale.saved(run.checkpoint)
        until_copied(run)
    heir.go_on(5, prunes=True)
    back_up(heir, url)
    heir.store.close()
    run.step()
    before = files(url)
    stale.saved(run.checkpoint)
    until(lambda: "continues this run" in (stale.notice() or ""))
    assert files(url) == before
    restore(url, tmp_path / "newer")
    assert content(tmp_path / "newer") == content(heir.path)


def test_a_log_that_lost_its_end_is_copied_from_where_it_goes_on(run, url, tmp_path):
    """The backup had more of it than the disk, when the power went."""
    run.go_on(8)
    run.save()
    kept = {path: path.read_bytes() for path in run.path.glob("events.db*")}
    run.save = lambda: None
    run.go_on(5)
    back_up(run, url)
    run.store.close()
    for path, data in kept.items():
        path.write_bytes(data)
    run.begin()
    back_up(run, url)
    restore(url, tmp_path / "new")
    assert content(tmp_path / "new") == content(run.path)


def test_a_backup_costs_by_what_was_added_and_the_writer_does_not_wait(run, tmp_path):
    url = str(tmp_path / "backup")
    run.go_on(12)
    run.save()
    for n in range(500):  # a long past
        segment(run.store, TrajectoryId(0, n), [n] * 2_000)
    run.store.commit()
    run.store._connection.execute("PRAGMA busy_timeout = 0")  # to wait is an error
    thread = started(run, url)
    while not copied(run.path):
        run.go_on(1)
    thread.close()
    run.step()
    back_up(run, url)
    first, *_, last = [path.stat().st_size for path in sorted(Path(url).glob("*/rows/*.db"))]
    assert first > 8e6
    assert last < 1e6


def test_what_is_no_backup_is_said_and_another_run_is_not_mixed_in(run, url, tmp_path):
    assert "is no backup of a run" in refusal(restore, url, tmp_path / "new")
    run.step()
    back_up(run, url)
    assert "run: is not empty; name a new directory" in refusal(restore, url)
    assert f"{url} holds a run already; `rhymeflow resume {url}`" in refusal(check_free, url)
    other = MadeUpRun(tmp_path / "other", 5)
    thread = started(other, url)
    until(lambda: "holds another run" in (thread.notice() or ""))
    other.store.close()
    fs = backups.BackupStorage(url)._fs
    for path in files(url):
        if path.endswith("/model"):
            fs.pipe_file(path, b"cut")
    told = refusal(restore, url, tmp_path / "new")
    assert re.search("no backup in it is complete: .*/model is cut short", told)
    assert not (tmp_path / "new").exists()
    (beginning,) = fs.glob(f"{url}/*/beginning.json")
    fs.pipe_file(beginning, b'{"run": "of 0", "schema": 17}')
    told = refusal(restore, url, tmp_path / "new")
    assert "has schema version 17, layout 1, and this Rhymeflow" in told


def test_a_backup_that_cannot_be_reached_is_said_once_and_tried_again(run, url, monkeypatch):
    monkeypatch.setattr(backups, "END_SECONDS", 0.2)
    FlakyFileSystem.share, FlakyFileSystem.rng = 1.0, random.Random(1)
    run.step()
    notices = []

    def say(text: str, thread: BackupThread) -> bool:
        notices.extend(filter(None, [thread.notice()]))
        return bool(notices) and text in notices[-1]

    thread = started(run, url)
    until(lambda: say("cannot write", thread))
    assert len(notices) == 1
    until(lambda: copied(run.path))
    last = run.store._last_seq
    assert backup_line(run.path, last, 7.0).startswith(f"{url}: {last} events, 7 s behind (cannot")
    FlakyFileSystem.share = 0.0
    until(lambda: say("is up to date again", thread))
    run.go_on(1)
    thread.close()
    assert backup_line(run.path, run.store._last_seq, 7.0) == f"{url}: up to date"
    FlakyFileSystem.share = 1.0
    began = time.monotonic()
    late = started(run, url)
    late.close()
    assert time.monotonic() - began < 5, "at the end nobody waits long"


def test_a_backup_that_is_deleted_is_said_and_costs_no_run(run, url, monkeypatch):
    monkeypatch.setattr(backups, "END_SECONDS", 1.0)  # the end waits so long for what cannot come
    run.step()
    thread = started(run, url)
    until(lambda: copied(run.path))
    FlakyFileSystem().rm(url, recursive=True)
    run.step()
    thread.saved(run.checkpoint)
    until(lambda: "was deleted" in (thread.notice() or ""))
    thread.close()


def test_a_defect_of_the_last_backup_is_raised(run, url, monkeypatch):
    run.step()
    thread = started(run, url)
    until(lambda: copied(run.path))
    monkeypatch.setattr(backups, "read_rows", lambda *_: 1 / 0)
    run.step()
    with pytest.raises(ZeroDivisionError):
        thread.close()


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_run_whose_machine_is_lost_goes_on_from_its_backup(tmp_path, elsewhere):
    """Killed with all its processes and its directory deleted: what it does again, it does as
    before. Lost is no more than what came after the checkpoint before the last. Checkpoints are
    in the backup, or in `run.checkpoint_dir`."""
    run_dir, url = tmp_path / "run", f"{tmp_path}/backup"
    where = f"file://{tmp_path}/checkpoints" if elsewhere else None
    run = {"backup": url, "checkpoint_dir": where}
    config = small(tmp_path, learner={"max_steps": 9}, run=run, **SYNCHRONOUS)
    process = Command("train", file_of(config, tmp_path), cwd=tmp_path)
    until(lambda: published(run_dir) >= 7)
    for pid in (process.pid, *descendants(process.pid)):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    saved = list(CheckpointPlace(where or run_dir / "checkpoints").up_to())
    done, sampled = learned(run_dir), tokens(run_dir)
    shared_memory.free_left(shared_memory.prefix_for(run_dir, ""))
    shutil.rmtree(run_dir)
    again = Command("resume", url, cwd=tmp_path)
    assert again.wait() == 0, again.output
    told = re.match(rf"{url}: the log up to event \d+, version (\d+)\n", again.output)
    assert told, again.output
    assert saved[-2] <= int(told[1])
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["backup"]) == (9, f"{url}: up to date")
    copied_there = [path for path in Path(url).rglob("*.safetensors")]
    assert bool(copied_there) != elsewhere
    assert 9 in CheckpointPlace(where or run_dir / "checkpoints").up_to()
    audit(run_dir)
    whole = learned(run_dir)
    assert all(whole[step].items() >= row.items() for step, row in done.items())
    responses = tokens(run_dir)
    assert all(responses[which].startswith(part) for which, part in sampled.items())
