"""What this system has and others do not is not needed: the other way is taken here too."""

import os
import sys
from multiprocessing import resource_tracker

import pytest

from rhymeflow import doctor
from rhymeflow.errors import UserError
from rhymeflow.runtime import processes
from rhymeflow.utils import cores, shared_memory


@pytest.fixture
def macos(monkeypatch, tmp_path):
    for name in ("sched_getaffinity", "sched_setaffinity", "posix_fallocate"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(shared_memory, "DIRECTORY", tmp_path / "no_dev_shm")
    monkeypatch.setattr("platform.system", lambda: "Darwin")


@pytest.mark.parametrize("prefix", ["rhymeflow", "rhymeflow-history", "rf-0123abcd-w"])
def test_memory_is_shared_without_dev_shm(macos, monkeypatch, prefix):
    monkeypatch.setattr(os, "getpid", lambda: 99998)  # the largest there
    name = shared_memory.new_name(prefix)
    assert len(f"/{name}") <= 31, "macOS refuses a longer name"
    ours = shared_memory.create(name, 8192, what="a test", advice="none")
    try:
        ours[5] = 7
        theirs = shared_memory.attach(name, writable=False)
        assert theirs[5] == 7
    finally:
        shared_memory.free(name)
    with pytest.raises(FileNotFoundError):
        shared_memory.attach(name, writable=False)


@pytest.mark.skipif(not shared_memory.DIRECTORY.is_dir(), reason="memory is no file here")
def test_what_a_killed_run_left_is_found_by_its_directory(tmp_path):
    for name in ("run", "copy"):
        (tmp_path / name).mkdir()
    prefixes = [shared_memory.prefix_for(tmp_path / name, "w") for name in ("run", "copy")]
    names = [shared_memory.new_name(prefix) for prefix in prefixes]
    for name in names:
        shared_memory.create(name, 4096, what="a test", advice="none")
    shared_memory.free_left(shared_memory.prefix_for(tmp_path / "run", ""))
    assert [(shared_memory.DIRECTORY / name).exists() for name in names] == [False, True]
    resource_tracker.unregister(f"/{names[0]}", "shared_memory")
    shared_memory.free(names[1])


def test_cores_are_counted_and_pinning_is_refused(macos):
    assert cores.usable_cores() == os.cpu_count()
    with pytest.raises(UserError, match="cannot pin a process to cores"):
        cores.can_stay_on((0, 1), "rollout.cpus.0")


def test_workers_are_spawned(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert processes.context().get_start_method() == "spawn"
    processes.prepare()  # nothing to prepare


def test_doctor_does_not_ask_for_dev_shm(macos, monkeypatch):
    monkeypatch.setattr(doctor, "_torch", lambda: [])  # which asks for the system when it is loaded
    findings = doctor.examine()
    assert "does not say how much" in findings
    assert "/dev/shm is missing" not in findings
