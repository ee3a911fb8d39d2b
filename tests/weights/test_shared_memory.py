"""The weight store among real processes: whole versions, proof, and the death of anybody."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping

import msgspec
import pytest
import torch
from torch import Tensor

from rhymeflow.errors import UserError
from rhymeflow.utils import shared_memory
from rhymeflow.weights import manifest, proof, slots
from rhymeflow.weights.base import ChecksumMismatch, VersionUnavailable
from rhymeflow.weights.handle import SharedMemoryWeightHandle
from rhymeflow.weights.install import install
from rhymeflow.weights.manifest import ManifestMismatch
from rhymeflow.weights.shared_memory import SharedMemoryWeightReader, SharedMemoryWeightStore

SPAWN = multiprocessing.get_context("spawn")


def tensors(value: float, size: int = 1000) -> dict[str, Tensor]:
    """Three tensors of two dtypes, each element being `value`."""
    return {
        "embed.weight": torch.full((7, size), value),
        "layer.weight": torch.full((size, 3), value, dtype=torch.bfloat16),
        "layer.scale": torch.tensor(float(value)),
    }


class Spy(Mapping):
    """Tensors that run `then` just before the last of them is touched.

    `checks`: how often it is touched before that, to be checked.
    """

    def __init__(
        self, inner: dict[str, Tensor], then: Callable[[], object], *, checks: int = 1
    ) -> None:
        self.inner, self.then, self.touches_left = inner, then, checks

    def __getitem__(self, name: str) -> Tensor:
        if name == list(self.inner)[-1]:
            if self.touches_left == 0:
                self.then()
            self.touches_left -= 1
        return self.inner[name]

    def __contains__(self, name: object) -> bool:
        return name in self.inner

    def __iter__(self) -> Iterator[str]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


def values(held: Mapping[str, Tensor]) -> set[float]:
    return {float(v) for tensor in held.values() for v in tensor.float().unique()}


@pytest.fixture
def store():
    store = SharedMemoryWeightStore.create(manifest.manifest_of(tensors(0)))
    yield store
    store.close()


# -- one process ----------------------------------------------------------------------------------


def test_pull_brings_what_was_pushed():
    torch.manual_seed(0)
    pushed = {
        "a": torch.randn(33, 65),
        "b": torch.randn(129).bfloat16(),
        "transposed": torch.randn(5, 9).T,
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 4),
    }
    store = SharedMemoryWeightStore.create(manifest.manifest_of(pushed))
    reader = SharedMemoryWeightReader(store.handle)
    checksum = store.publish(3, pushed)
    into = {name: torch.zeros_like(tensor) for name, tensor in pushed.items()}
    into["a"] = torch.zeros(65, 33).T  # not contiguous
    into["b"] = torch.nn.Parameter(into["b"])
    assert install(reader, into) == (3, checksum)
    assert all(torch.equal(into[name], pushed[name]) for name in pushed)
    assert proof.checksum_of(store.handle.manifest, into) == checksum
    store.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_push_and_pull_on_a_gpu():
    pushed = {name: tensor.cuda() for name, tensor in tensors(1.5).items()}
    store = SharedMemoryWeightStore.create(manifest.manifest_of(pushed))
    checksum = store.publish(1, pushed)
    into = {name: torch.zeros_like(tensor) for name, tensor in pushed.items()}
    assert install(SharedMemoryWeightReader(store.handle), into) == (1, checksum)
    assert values(into) == {1.5}
    store.close()


def test_two_versions_are_held_and_older_ones_are_not(store):
    reader = SharedMemoryWeightReader(store.handle)
    assert reader.version is None
    with pytest.raises(VersionUnavailable, match=r"does not hold any version; it holds \[\]"):
        install(reader, tensors(0))
    for version in range(3):
        store.publish(version, tensors(version))
        assert reader.version == version
    into = tensors(-1)
    assert install(reader, into, want=1).version == 1
    assert values(into) == {1.0}
    assert install(reader, into).version == 2
    assert values(into) == {2.0}
    with pytest.raises(VersionUnavailable, match=r"does not hold version 0; it holds \[1, 2\]"):
        install(reader, into, want=0)
    with pytest.raises(VersionUnavailable, match="does not hold version 3"):
        install(reader, into, want=3)


def test_a_pull_during_a_push_gets_the_old_version_whole(store):
    reader = SharedMemoryWeightReader(store.handle)
    store.publish(1, tensors(1))
    during = []

    def pull() -> None:
        into = tensors(-1)
        during.append((install(reader, into).version, values(into)))
        during.append((install(reader, into, want=1).version, values(into)))

    store.publish(2, Spy(tensors(2), pull, checks=0))
    assert during == [(1, {1.0}), (1, {1.0})]


def test_the_version_being_overwritten_is_not_given_out(store):
    reader = SharedMemoryWeightReader(store.handle)
    store.publish(1, tensors(1))
    store.publish(2, tensors(2))

    def pull() -> None:
        with pytest.raises(VersionUnavailable, match=r"does not hold version 1; it holds \[2\]"):
            install(reader, tensors(-1), want=1)

    store.publish(3, Spy(tensors(3), pull, checks=0))


@pytest.mark.parametrize(("pushes", "expected"), [(1, 1), (2, 3), (3, 4)])
def test_a_pull_overtaken_by_pushes_begins_again(store, pushes, expected):
    """One push writes the other slot, and the old version is still good; two overwrite it."""
    reader = SharedMemoryWeightReader(store.handle)
    store.publish(1, tensors(1))

    def overtake() -> None:
        for version in range(2, 2 + pushes):
            store.publish(version, tensors(version))

    into = tensors(-1)
    assert install(reader, Spy(into, overtake)).version == expected
    assert values(into) == {float(expected)}


def test_a_wrong_byte_is_found_and_its_tensor_named(store):
    reader = SharedMemoryWeightReader(store.handle)
    store.publish(1, tensors(1))
    whole = shared_memory.path_of(store.handle.name).read_bytes()
    place = whole.index(torch.full((1000,), 1.0, dtype=torch.bfloat16).view(torch.uint8).numpy())
    with shared_memory.path_of(store.handle.name).open("r+b") as file:
        file.seek(place + 77)
        file.write(bytes([whole[place + 77] ^ 1]))
    with pytest.raises(ChecksumMismatch, match=r"version 1.* 1 of 3 .* first layer\.weight"):
        install(reader, tensors(-1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer.scale": None}, "layer.scale is in the weight store's manifest, but not given"),
        ({"extra": torch.zeros(1)}, "extra is not in the weight store's manifest"),
        (
            {"layer.weight": torch.zeros(3, 1000).bfloat16()},
            r"layer.weight is bfloat16\[3, 1000\], in the manifest bfloat16\[1000, 3\]",
        ),
        (
            {"layer.weight": torch.zeros(1000, 3)},
            r"layer.weight is float32\[1000, 3\], in the manifest bfloat16\[1000, 3\]",
        ),
    ],
)
def test_other_tensors_are_refused_by_name(store, change, message):
    given = {k: v for k, v in {**tensors(1), **change}.items() if v is not None}
    with pytest.raises(ManifestMismatch, match=message):
        store.publish(1, given)
    store.publish(1, tensors(1))
    with pytest.raises(ManifestMismatch, match=message):
        install(SharedMemoryWeightReader(store.handle), given)


def test_tied_parameters_are_given_once():
    weight = torch.zeros(3)
    with pytest.raises(AssertionError, match="a and b are one tensor"):
        manifest.manifest_of({"a": weight, "b": weight})


def test_too_little_shared_memory_is_the_users_to_know():
    huge = manifest.plan({"w": ((2**48,), torch.float32)})
    with pytest.raises(UserError, match="no room for two copies of the weights"):
        SharedMemoryWeightStore.create(huge)
    assert not list(shared_memory.path_of("").glob(f"rhymeflow-{os.getpid()}-*"))


def test_the_handle_goes_by_value(store):
    handle = store.handle
    assert pickle.loads(pickle.dumps(handle)) == handle
    packed = msgspec.msgpack.encode(handle)
    assert msgspec.msgpack.decode(packed, type=SharedMemoryWeightHandle) == handle


# -- several processes ----------------------------------------------------------------------------


def pull_until(handle: SharedMemoryWeightHandle, last: int, report) -> None:
    torch.set_num_threads(1)
    reader = SharedMemoryWeightReader(handle)
    into = tensors(-1, 20_000)
    seen = [install(reader, into).version]
    report.send("up")
    while seen[-1] < last:
        version = install(reader, into).version
        assert values(into) == {float(version)}, f"torn: {values(into)} at {version}"
        assert version >= seen[-1], "went back"
        seen.append(version)
    report.send(len(set(seen)))


def push_range(handle: SharedMemoryWeightHandle, versions: list[int]) -> None:
    torch.set_num_threads(1)
    store = SharedMemoryWeightStore.attach(handle)
    for version in versions:
        store.publish(version, tensors(version, 20_000))


def start(target, *args):
    """Start a process with a pipe as its last argument; wait until it says it is up."""
    ours, theirs = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=target, args=(*args, theirs), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(60), "did not come up"
    assert ours.recv() == "up"
    return process, ours


def test_racing_pulls_are_never_torn():
    store = SharedMemoryWeightStore.create(manifest.manifest_of(tensors(0, 20_000)))
    store.publish(0, tensors(0, 20_000))
    readers = [start(pull_until, store.handle, 60) for _ in range(2)]
    pace = [0.0, 0.0, 0.0, 0.004]  # bursts that overtake readers, then a breath
    for version in range(1, 61):
        store.publish(version, tensors(version, 20_000))
        time.sleep(pace[version % 4])
    for process, report in readers:
        assert report.poll(60), "a reader died"
        assert report.recv() > 1
        process.join()
        assert process.exitcode == 0
    store.close()


def test_pushers_exclude_each_other():
    store = SharedMemoryWeightStore.create(manifest.manifest_of(tensors(0, 20_000)))
    store.publish(0, tensors(0, 20_000))
    pushers = [SPAWN.Process(target=push_range, args=(store.handle, [v] * 30)) for v in (1, 2)]
    for pusher in pushers:
        pusher.start()
    reader, into = SharedMemoryWeightReader(store.handle), tensors(-1, 20_000)
    while any(pusher.is_alive() for pusher in pushers):
        version = install(reader, into).version
        assert values(into) == {float(version)}
    assert [pusher.exitcode for pusher in pushers] == [0, 0]
    assert slots.attach(store.handle, writable=False).published == 61
    store.close()


def hang_in_pull(handle: SharedMemoryWeightHandle, report) -> None:
    install(
        SharedMemoryWeightReader(handle),
        Spy(tensors(-1), lambda: (report.send("up"), time.sleep(600))),
    )


def hang_in_push(handle: SharedMemoryWeightHandle, report) -> None:
    SharedMemoryWeightStore.attach(handle).publish(
        2, Spy(tensors(2), lambda: (report.send("up"), time.sleep(600)), checks=0)
    )


def test_a_reader_killed_in_a_pull_blocks_nobody(store):
    store.publish(1, tensors(1))
    process, _ = start(hang_in_pull, store.handle)
    store.publish(2, tensors(2))  # while it hangs
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    for version in (3, 4):
        store.publish(version, tensors(version))
    into = tensors(-1)
    assert install(SharedMemoryWeightReader(store.handle), into).version == 4
    assert values(into) == {4.0}


def test_a_writer_killed_in_a_push_leaves_the_old_version(store):
    store.publish(1, tensors(1))
    process, _ = start(hang_in_push, store.handle)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    reader, into = SharedMemoryWeightReader(store.handle), tensors(-1)
    assert reader.version == 1
    assert install(reader, into).version == 1
    assert values(into) == {1.0}
    store.publish(3, tensors(3))  # the dead writer's lock is gone, its half slot is written over
    assert install(reader, into).version == 3
    assert values(into) == {3.0}


ATTACH = """
import sys, pickle
from rhymeflow.weights.shared_memory import SharedMemoryWeightReader, SharedMemoryWeightStore
handle = pickle.loads(bytes.fromhex(sys.argv[1]))
SharedMemoryWeightReader(handle), SharedMemoryWeightStore.attach(handle)
"""

CREATE = """
import time, torch
from rhymeflow.utils import shared_memory
from rhymeflow.weights import manifest, proof, slots
from rhymeflow.weights.shared_memory import SharedMemoryWeightStore
server = SharedMemoryWeightStore.create(manifest.plan({"w": ((1000,), torch.float32)}))
print(shared_memory.path_of(server.handle.name), flush=True)
time.sleep(600)
"""


def test_a_process_that_attached_and_ended_frees_nothing(store):
    """Neither a child of ours nor a stranger with a resource tracker of its own."""
    store.publish(1, tensors(1))
    handle = pickle.dumps(store.handle).hex()
    done = subprocess.run(
        [sys.executable, "-c", ATTACH, handle], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    time.sleep(0.2)
    assert shared_memory.path_of(store.handle.name).exists()
    assert install(SharedMemoryWeightReader(store.handle), tensors(-1)).version == 1


def test_memory_of_a_killed_owner_is_freed():
    owner = subprocess.Popen(
        [sys.executable, "-c", CREATE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    path = owner.stdout.readline().strip()
    assert os.path.exists(path)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 10
    while os.path.exists(path):
        assert time.monotonic() < deadline, f"{path} is still there"
        time.sleep(0.05)


def test_closing_frees_the_memory_and_readers_keep_theirs(store):
    reader = SharedMemoryWeightReader(store.handle)
    store.publish(1, tensors(1))
    store.close()
    store.close()  # again is nothing
    assert not shared_memory.path_of(store.handle.name).exists()
    assert install(reader, tensors(-1)).version == 1
    with pytest.raises(FileNotFoundError):
        SharedMemoryWeightReader(store.handle)
