"""Checkpoints in `run.checkpoint_dir`: complete or absent, of one run, damaged, out of reach."""

import itertools
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from rhymeflow.errors import StorageError, UserError
from rhymeflow.learner.checkpoint import Saver
from rhymeflow.store.checkpoint_dirs import (
    CheckpointPlace,
    Owner,
    check_free,
    claimed_place,
    paths_of,
    where_of,
)
from tests.learner.builders import made_up_batch, tiny_learner
from tests.learner.test_checkpoint import wait_for
from tests.store.made_up import MadeUpRun

URLS = (f"memory://bucket-{n}/run" for n in itertools.count())


@pytest.fixture(params=["URL", "path"])
def where(request, tmp_path):
    return next(URLS) if request.param == "URL" else str(tmp_path / "shared")


@pytest.fixture
def url():
    return next(URLS)


def files(url: str) -> dict[str, bytes]:
    fs, root = MemoryFileSystem(), url.removeprefix("memory:/")
    return {name.removeprefix(f"{root}/"): fs.cat_file(name) for name in fs.find(root)}


def saved(where: str, *versions: int, keep: tuple[int, ...] = (), owner=None) -> list[str | None]:
    """Save a learner, trained once more for each; return the errors."""
    learner, saver = tiny_learner(), Saver(CheckpointPlace(where, owner))
    for version in versions:
        learner.train(made_up_batch(seed=version), version - 1)
        saver.begin(version, learner.snapshot(), keep)
    return [each.error for each in wait_for(saver, len(versions))]


def test_the_newest_is_read_back_and_others_are_deleted(where):
    assert saved(where, 1, 2, 3, keep=(1,)) == [None] * 3
    found = CheckpointPlace(where).up_to()
    assert list(found) == [1, 3]
    assert [tiny_learner().restore(each) for each in found.values()] == [1, 3]
    CheckpointPlace(where).set_aside_after(1)
    assert list(CheckpointPlace(where).up_to()) == [1]
    assert saved(where, 1) == [None], "one is replaced"


def test_what_is_half_written_or_half_deleted_is_no_checkpoint(url, monkeypatch):
    put = MemoryFileSystem.put_file

    def fails(fs, source, path, **options):
        if path.endswith(".safetensors"):
            raise ConnectionError("the network is gone")
        put(fs, source, path, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", fails)
    (error,) = saved(url, 1)
    assert "step-1/model.safetensors: the network is gone" in error
    assert files(url)
    assert not CheckpointPlace(url).up_to()
    monkeypatch.undo()
    assert saved(url, 2) == [None]
    assert not any(name.startswith("step-1/") for name in files(url)), "what was left is deleted"
    monkeypatch.setattr(MemoryFileSystem, "mv", fails)
    with pytest.raises(StorageError):
        CheckpointPlace(url).at(2).set_aside("damaged-")
    assert not CheckpointPlace(url).up_to(), "half of it may have another name"


@pytest.mark.parametrize("name", ["learner/.metadata", "learner/__0_0.distcp", "model.safetensors"])
@pytest.mark.parametrize("how", ["cut", "missing"])
def test_a_damaged_one_is_said_and_set_aside(url, name, how):
    saved(url, 1)
    path = f"{url}/step-1/{name}"
    MemoryFileSystem().rm(path)
    if how == "cut":
        MemoryFileSystem().pipe_file(path, b"x")
    learner, checkpoint = tiny_learner(), CheckpointPlace(url).at(1)
    with pytest.raises(UserError, match=f"step-1: cannot be read: {name} is missing or cut short"):
        learner.restore(checkpoint)
    assert learner.checksum() == tiny_learner().checksum()
    checkpoint.set_aside("damaged-")
    assert not CheckpointPlace(url).up_to()
    assert {each.partition("/")[0] for each in files(url)} == {"damaged-step-1"}


def test_bytes_that_changed_are_damage_and_a_network_that_is_gone_is_not(url, monkeypatch):
    saved(url, 1)
    path = f"{url}/step-1/learner/__0_0.distcp"
    content = MemoryFileSystem().cat_file(path)
    MemoryFileSystem().pipe_file(path, b"\0" * len(content))
    with pytest.raises(UserError, match="step-1: cannot be read"):
        tiny_learner().restore(CheckpointPlace(url).at(1))
    MemoryFileSystem().pipe_file(path, content)

    def fails(fs, path, *args, **options):
        raise ConnectionError("the network is gone")

    monkeypatch.setattr(MemoryFileSystem, "_open", fails)  # which torch uses
    why = ".*the network is gone|metadata is None"  # older torch does not say why
    with pytest.raises(StorageError, match=f"step-1: cannot be read: ({why})"):
        tiny_learner().restore(CheckpointPlace(url).at(1))
    monkeypatch.undo()
    monkeypatch.setattr(MemoryFileSystem, "find", fails)
    with pytest.raises(StorageError, match=r"cannot list .*step-1: the network is gone"):
        tiny_learner().restore(CheckpointPlace(url).at(1))


def test_it_is_of_one_run_and_its_last_attempt(where):
    CheckpointPlace(where, Owner("one that failed before it had a checkpoint", "1")).claim()
    check_free(where)
    CheckpointPlace(where, Owner("a run", "1")).claim()
    assert saved(where, 1, owner=Owner("a run", "1")) == [None]
    with pytest.raises(UserError, match="has step-1, and each run needs its own"):
        check_free(where)
    with pytest.raises(UserError, match=r"has checkpoints of another run \(a run"):
        CheckpointPlace(where, Owner("another", "1")).claim()
    CheckpointPlace(where, Owner("a run", "2")).claim()
    (error,) = saved(where, 2, owner=Owner("a run", "1"))
    assert "of a run, attempt 2" in error
    assert list(CheckpointPlace(where).up_to()) == [1]


def test_a_url_without_its_slashes_is_no_path():
    with pytest.raises(UserError, match="s3:/bucket/run: a URL is written as in s3://"):
        check_free("s3:/bucket/run")


def test_the_run_directory_says_where_they_are(tmp_path, where):
    run = MadeUpRun(tmp_path / "run")
    run.step()
    with pytest.raises(UserError, match=r"the run's checkpoints are in .*run/checkpoints"):
        claimed_place(where, run.path)
    (run.path / "checkpoints").rename(tmp_path / "moved")
    claimed_place(where, run.path).check_owner()
    assert where_of(run.path) == where
    saved(where, 1, owner=claimed_place(where, run.path)._owner)
    assert paths_of(run.path) == ({} if "://" in where else {1: Path(where) / "step-1"})
    with pytest.raises(UserError, match=f"the run's checkpoints are in {where}"):
        claimed_place(None, run.path)
    other, file = tmp_path / "other", tmp_path / "file"
    with pytest.raises(UserError, match=f"other has no checkpoint, and step-1 .* is in {where}"):
        claimed_place(str(other), run.path)
    assert where_of(run.path) == where
    file.touch()
    with pytest.raises(UserError, match=r"run\.checkpoint_dir: .*file is no directory"):
        claimed_place(str(file), run.path)
    run.store.close()
