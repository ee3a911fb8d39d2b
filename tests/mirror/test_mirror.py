"""A mirror: a run that is rebuilt from it is the run, and what is not whole is not taken for it."""

from __future__ import annotations

import itertools
import random
import time
from contextlib import suppress

import pytest
from fsspec import register_implementation
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.errors import UserError
from rhymeflow.mirror import mirror as mirroring
from rhymeflow.mirror import rows
from rhymeflow.mirror.lineage import chain, newest, read_all
from rhymeflow.mirror.mirror import Mirror
from rhymeflow.mirror.remote import Remote, Unreachable
from rhymeflow.mirror.restore import restore
from rhymeflow.mirror.shipper import Shipper
from rhymeflow.observe.summary import mirror_line, mirror_state
from rhymeflow.store import mirrored
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.mirror.runs import MadeUpRun, content, ship, ship_all

NAMES = (f"memory://mirror-{n}" for n in itertools.count())


class FlakyFileSystem(MemoryFileSystem):
    """Fails, before or after it has written all or a part, as often as `share` says."""

    protocol = "flaky"
    share, rng = 0.0, random.Random(0)

    def pipe_file(self, path, value, mode="overwrite", **options):
        fails, size = self.rng.random() < self.share, self.rng.choice([0, 0.5, 1])
        if fails:
            how = self.rng.choice(["never", "silently", "loudly"])
            if how != "never":
                super().pipe_file(path, value[: int(size * len(value))], mode, **options)
            if how != "silently":
                raise ConnectionError("the network is gone")
            return
        super().pipe_file(path, value, mode, **options)

    def put_file(self, source, path, **options):
        if self.rng.random() < self.share:
            super().pipe_file(path, b"half")
            raise TimeoutError
        super().put_file(source, path, **options)


register_implementation("flaky", FlakyFileSystem, clobber=True)


@pytest.fixture
def url():
    return next(NAMES)


@pytest.fixture
def run(tmp_path):
    run = MadeUpRun(tmp_path / "run")
    yield run
    run.close()


def files(url: str) -> list[str]:
    fs = Remote(url)._fs
    return sorted(fs.find(Remote(url)._root))


@pytest.mark.parametrize("prunes", [False, True])
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_run_is_rebuilt_as_it_was(run, url, tmp_path, prunes, kind):
    url = url if kind == "memory" else str(tmp_path / "mirror")
    for _ in range(6):
        run.go_on(10, prunes=prunes)
        assert ship(run, url)
    (said,) = restore(url, tmp_path / "new")
    assert f"the log until event {run.store._last_seq}, version {run.version}" in said
    assert content(tmp_path / "new") == content(run.path)
    assert not prunes or content(run.path)["pruned"]
    for path in (run.path / "checkpoints").rglob("*"):
        copy = tmp_path / "new" / path.relative_to(run.path)
        assert path.is_dir() or copy.read_bytes() == path.read_bytes()
    assert (tmp_path / "new" / "config.yaml").read_text() == (run.path / "config.yaml").read_text()
    SqliteTrajectoryStore(tmp_path / "new" / "events.db").close()


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    acts=st.lists(st.sampled_from(["on", "ship", "resume", "move"]), min_size=3, max_size=14),
    share=st.sampled_from([0.0, 0.2, 0.5]),
    limit=st.sampled_from([2, 5, 50]),
)
def test_whatever_fails_the_mirror_comes_to_have_all(tmp_path_factory, seed, acts, share, limit):
    """Errors, writes cut short, attempts that follow one another here and elsewhere."""
    folder, url = tmp_path_factory.mktemp("runs"), next(NAMES).replace("memory", "flaky")
    before, rows.ROWS_AT_ONCE = rows.ROWS_AT_ONCE, limit
    FlakyFileSystem.rng, FlakyFileSystem.share = random.Random(seed), share
    run, number = MadeUpRun(folder / "run", seed), 0
    try:
        shipper = Shipper(run.path, Remote(url))
        for act in [*acts, "ship"]:
            if act == "on":
                run.go_on(4, prunes=seed % 2 == 0)
            elif act == "ship":
                for _ in range(3):
                    with suppress(Unreachable):
                        ship_all(shipper)
            else:
                settle(shipper)
                if act == "move":
                    number += 1
                    run.close()
                    restore(url, folder / str(number))
                    assert content(folder / str(number)) == content(run.path)
                    run.path = folder / str(number)
                run.resume()
                FlakyFileSystem.share = share
                shipper = Shipper(run.path, Remote(url))
        settle(shipper)
        restore(url, folder / "last")
        assert content(folder / "last") == content(run.path)
    finally:
        rows.ROWS_AT_ONCE = before
        FlakyFileSystem.share = 0.0
        run.close()


def settle(shipper: Shipper) -> None:
    """All that is new is copied, now that nothing fails any more."""
    FlakyFileSystem.share = 0.0
    with suppress(Unreachable):  # of a checkpoint, whose copying had begun
        ship_all(shipper)
    assert ship_all(shipper)
    shipper.close()


@pytest.mark.parametrize("part", ["log", "tokens"])
@pytest.mark.parametrize("how", ["cut", "changed", "missing"])
def test_what_is_not_whole_is_left_out_and_said(run, url, tmp_path, part, how):
    states = []
    for _ in range(4):
        run.go_on(3)
        assert ship(run, url)
        states.append(content(run.path))
    fs = Remote(url)._fs
    logs = [path for path in files(url) if f"/{part}/" in path]
    known = read_all(Remote(url))
    third = chain(known, newest(known, url))[2].name
    chosen = next(path for path in logs if f"/{third}/" in path)
    data = fs.cat_file(chosen)
    if how == "missing":
        fs.rm(chosen)
    else:
        fs.pipe_file(chosen, data[:-3] if how == "cut" else data[:-3] + b"abc")
    said = restore(url, tmp_path / "new")
    assert third in said[1]
    assert "is left out" in said[1]
    assert content(tmp_path / "new") in states[:2]


def test_a_controller_that_was_taken_for_dead_does_not_get_into_what_goes_on(run, url, tmp_path):
    run.go_on(5)
    zombie = Shipper(run.path, Remote(url))
    assert ship_all(zombie)
    restore(url, tmp_path / "new")
    at_restore = content(tmp_path / "new")
    run.go_on(5)  # it is not dead
    heir = MadeUpRun.__new__(MadeUpRun)
    heir.__dict__ |= {**run.__dict__, "path": tmp_path / "new", "open": dict(run.open)}
    heir.store = SqliteTrajectoryStore(tmp_path / "new" / "events.db")
    heir.resume()
    assert ship(heir, url)
    assert ship_all(zombie)
    zombie.close()
    heir.close()
    restore(url, tmp_path / "newer")
    found = content(tmp_path / "newer")
    assert found == content(heir.path)
    assert found["segments"] == at_restore["segments"]


def test_a_log_that_lost_its_end_is_copied_anew(run, url, tmp_path):
    """The mirror had more of it than the disk, when the power went."""
    run.go_on(5)
    (tmp_path / "old").mkdir()
    kept = (run.path / "events.db").read_bytes(), (run.path / "events.db-wal").read_bytes()
    run.go_on(5)
    assert ship(run, url)
    run.close()
    for name, data in zip(("events.db", "events.db-wal"), kept, strict=True):
        (run.path / name).write_bytes(data)
    run.store = SqliteTrajectoryStore(run.path / "events.db")
    run.resume()
    assert ship(run, url)
    restore(url, tmp_path / "new")
    assert content(tmp_path / "new") == content(run.path)


def test_another_run_is_not_mixed_in(run, url, tmp_path):
    assert ship(run, url)
    other = MadeUpRun(tmp_path / "other", 5)
    with pytest.raises(Unreachable, match="holds another run"):
        ship(other, url)
    other.close()


def test_checkpoints_that_the_run_deleted_go_and_needed_ones_stay(run, url):
    for _ in range(8):
        run.go_on(10, prunes=True)
        assert ship(run, url)
    there = {path.split("/")[-2] for path in files(url) if path.endswith("/model")}
    assert {path.name for path in (run.path / "checkpoints").iterdir()} <= there
    assert len(there) <= 4
    assert len([path for path in files(url) if "/snapshots/" in path]) <= 4


def test_a_pruned_log_without_its_checkpoint_is_refused(run, url, tmp_path):
    run.go_on(40, prunes=True)
    assert ship(run, url)
    fs = Remote(url)._fs
    for path in files(url):
        if path.endswith("/model"):
            fs.pipe_file(path, b"cut")
    with pytest.raises(UserError, match=r"has no whole checkpoint from version \d+ to"):
        restore(url, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("memory://nothing", "is no mirror of a run"),
        ("nix://x", "run.mirror: nix://x: Protocol not"),
    ],
)
def test_what_is_no_mirror_is_said(tmp_path, url, said):
    with pytest.raises(UserError, match=said) as refused:
        restore(url, tmp_path / "new")
    assert len(str(refused.value).splitlines()) == 1


def test_a_mirror_that_cannot_be_reached_is_said_once_and_tried_again(run, url, monkeypatch):
    monkeypatch.setattr(mirroring, "RETRY_SECONDS", (0.01, 0.02))
    url = url.replace("memory", "flaky")
    FlakyFileSystem.share, FlakyFileSystem.rng = 1.0, random.Random(1)
    mirror = Mirror(run.path, url, 0.02)
    run.go_on(5)
    mirror.start()
    notices = _until(mirror, "cannot write")
    assert len(notices) == 1
    FlakyFileSystem.share = 0.0
    assert "up to date again" in _until(mirror, "up to date")[-1]
    run.go_on(5)
    mirror.close()
    state = mirror_state(run.path, run.store._last_seq, 1.0)
    assert state is not None
    assert mirror_line(state) == f"{url}: up to date"


def _until(mirror: Mirror, said: str) -> list[str]:
    notices = []
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if (notice := mirror.notice()) is not None:
            notices.append(notice)
            if said in notice:
                return notices
        time.sleep(0.005)
    raise AssertionError(notices)


def test_what_is_replaced_is_there_until_all_of_the_new_is(tmp_path, monkeypatch):
    """A machine that is lost while it writes leaves the old file."""
    remote = Remote(str(tmp_path))
    remote.put("files/metrics", b"old")
    pipe = LocalFileSystem.pipe_file

    def is_lost(self, path, value, *args, **options):
        pipe(self, path, value[:2], *args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "pipe_file", is_lost)
        with pytest.raises(KeyboardInterrupt):
            remote.put("files/metrics", b"new and longer")
    assert remote.get("files/metrics") == b"old"
    remote.put("files/metrics", b"new and longer")
    assert remote.get("files/metrics") == b"new and longer"
    assert remote.names("files") == ["metrics"]


def test_at_the_end_nobody_waits_long_and_what_is_behind_is_known(run, url, monkeypatch):
    monkeypatch.setattr(mirroring, "END_SECONDS", 0.2)
    monkeypatch.setattr(mirroring, "RETRY_SECONDS", (0.01, 0.02))
    url = url.replace("memory", "flaky")
    FlakyFileSystem.share, FlakyFileSystem.rng = 1.0, random.Random(1)
    run.go_on(5)
    mirror = Mirror(run.path, url, 0.02)
    mirror.start()
    mirror.close()
    FlakyFileSystem.share = 0.0
    assert mirrored.read(run.path) is not None
    last = run.store._last_seq
    state = mirror_state(run.path, last, 7.0)
    assert state is not None
    assert mirror_line(state).startswith(f"{url}: {last} events, 7 s behind (cannot write")
