"""The weight store in shared memory: whole versions, proof, and readers that race a writer."""

import os
import time
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from rhymeflow.errors import UserError
from rhymeflow.runtime import processes
from rhymeflow.utils import shared_memory
from rhymeflow.weights import manifest
from rhymeflow.weights.base import SharedMemoryWeightHandle, VersionUnavailable
from rhymeflow.weights.install import Installation, SlabPlace
from rhymeflow.weights.manifest import ManifestMismatch
from rhymeflow.weights.proof import ChecksumMismatch
from rhymeflow.weights.shared_memory import SharedMemoryWeightStore
from tests.weights.made_up import bits, checksum_of, install, weights


def tensors(value: float, size: int = 1000) -> dict[str, Tensor]:
    """Three tensors of two dtypes, each element being `value`."""
    return {
        "embed.weight": torch.full((7, size), value),
        "layer.weight": torch.full((size, 3), value, dtype=torch.bfloat16),
        "layer.scale": torch.tensor(float(value)),
    }


class Spy(dict):
    """Tensors that run `then` just before the last of them is published."""

    def __init__(self, inner: dict[str, Tensor], then: Callable[[], object]) -> None:
        super().__init__(inner)
        self.then = then

    def __getitem__(self, name: str) -> Tensor:
        if name == list(self)[-1]:
            self.then()
        return super().__getitem__(name)


def values(held: Mapping[str, Tensor]) -> set[float]:
    return {float(v) for tensor in held.values() for v in tensor.float().unique()}


@pytest.fixture
def store():
    store = SharedMemoryWeightStore(manifest.manifest_of(tensors(0)))
    yield store
    store.close()


@pytest.fixture
def delta():
    store = SharedMemoryWeightStore(manifest.manifest_of(weights(0)), keep=3)
    yield store
    store.close()


# -- one process ----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_pull_brings_what_was_pushed(device):
    torch.manual_seed(0)
    pushed = {
        "a": torch.randn(33, 65),
        "b": torch.randn(129).bfloat16(),
        "transposed": torch.randn(5, 9).T,
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 4),
    }
    pushed = {name: tensor.to(device) for name, tensor in pushed.items()}
    store = SharedMemoryWeightStore(manifest.manifest_of(pushed))
    checksum = store.publish(3, pushed)
    into = {name: torch.zeros_like(tensor) for name, tensor in pushed.items()}
    into["a"] = torch.zeros(65, 33, device=device).T  # not contiguous
    into["b"] = torch.nn.Parameter(into["b"])
    assert install(store.handle.open(), into) == (3, checksum)
    assert all(torch.equal(into[name], pushed[name]) for name in pushed)
    assert checksum_of(into) == checksum
    store.close()


@pytest.mark.parametrize(("before", "want"), [(1, None), (1, 1), (2, None), (2, 2)])
def test_a_pull_during_a_push_gets_the_old_version_whole(store, before, want):
    """The one before that is being written over, and is not given out."""
    reader = store.handle.open()
    for version in range(before + 1):
        store.publish(version, tensors(version))
    during = []

    def pull() -> None:
        into = tensors(-1)
        during.append((install(reader, into, want).version, values(into)))
        with pytest.raises(VersionUnavailable, match=rf"{before - 1}; it holds \[{before}\]"):
            Installation(into).pull_part(reader, before - 1)

    store.publish(before + 1, Spy(tensors(3), pull))
    assert during == [(before, {float(before)})]


@pytest.mark.parametrize(("pushes", "expected"), [(1, 1), (2, 3), (3, 4)])
def test_a_pull_overtaken_by_pushes_begins_again(store, pushes, expected, monkeypatch):
    """One push writes the other slot, and the old version is still good; two overwrite it."""
    store.publish(1, tensors(1))

    def overtake() -> None:
        for version in range(2, 2 + pushes):
            store.publish(version, tensors(version))

    into, copy, copied = tensors(-1), SlabPlace.copy, []

    def spied(place, *given):
        copied.append(place)
        if len(copied) == len(into):  # once, before the last tensor
            overtake()
        return copy(place, *given)

    monkeypatch.setattr(SlabPlace, "copy", spied)
    assert install(store.handle.open(), into).version == expected
    assert values(into) == {float(expected)}


def test_a_wrong_byte_is_found_and_its_tensor_named(store):
    store.publish(1, tensors(1))
    whole = (shared_memory.DIRECTORY / store.handle.name).read_bytes()
    place = whole.index(torch.full((1000,), 1.0, dtype=torch.bfloat16).view(torch.uint8).numpy())
    with (shared_memory.DIRECTORY / store.handle.name).open("r+b") as file:
        file.seek(place + 77)
        file.write(bytes([whole[place + 77] ^ 1]))
    with pytest.raises(ChecksumMismatch, match=r"version 1.* 1 of 3 .* first layer\.weight"):
        install(store.handle.open(), tensors(-1))


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
        install(store.handle.open(), given)


def test_tied_parameters_are_given_once():
    weight = torch.zeros(3)
    with pytest.raises(AssertionError, match="a and b are one tensor"):
        manifest.manifest_of({"a": weight, "b": weight})


def test_too_little_shared_memory_is_the_users_to_know(delta, monkeypatch):
    huge = manifest.plan({"w": ((2**48,), torch.float32)})
    own = f"rhymeflow-{os.getpid()}-*"
    before = set(shared_memory.DIRECTORY.glob(own))
    with pytest.raises(UserError, match="no room for two copies of the weights"):
        SharedMemoryWeightStore(huge)
    assert set(shared_memory.DIRECTORY.glob(own)) == before
    delta.publish(0, weights(0))

    def refuse(descriptor, start, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    with pytest.raises(UserError, match="no room for what changed in the weights"):
        delta.publish(1, weights(1))
    assert set(shared_memory.DIRECTORY.glob(own)) == before


# -- changes --------------------------------------------------------------------------------------


def files_of_changes(store):
    return list(shared_memory.DIRECTORY.glob(f"{store.handle.name}.*"))


def test_no_more_changes_are_kept_than_asked_for(delta):
    for version in range(7):
        delta.publish(version, weights(version))
    assert len(files_of_changes(delta)) == 3
    delta.close()
    assert not files_of_changes(delta)


def test_a_change_whose_whole_tensors_are_written_over_is_pulled_anew(delta):
    """Overtaken between the listed tensors and those that are copied."""
    delta.publish(0, weights(0))
    reader, into = delta.handle.open(), weights(9)
    installed = Installation(into)
    installed.pull(reader)
    delta.publish(1, {**weights(1), "norm": torch.full((33,), 2.0).bfloat16()})
    plain = reader.update

    def overtaken(have, want):
        reader.update = plain
        found = plain(have, want)
        for version in (2, 3, 4):
            delta.publish(version, weights(version))
        return found

    reader.update = overtaken
    with pytest.raises(VersionUnavailable):
        installed.pull_part(reader, 1)
    assert installed.pull(reader, 1).version >= 4
    assert bits(into) == bits(weights(installed.holds.version))


# -- several processes ----------------------------------------------------------------------------


def follow(handle: SharedMemoryWeightHandle, last: int, report) -> None:
    """Pull again and again; report how many pulls brought a version, and how many changes."""
    torch.set_num_threads(1)
    reader, into = handle.open(), weights(0)
    installed, updates, seen = Installation(into), 0, 1
    installed.pull(reader)
    report.send("up")
    while (before := installed.holds).version < last:
        updates += reader.update(before, None).steps is not None
        after = installed.pull(reader)
        assert after.version >= before.version, "went back"
        assert bits(into) == bits(weights(after.version)), f"torn: {after}"
        seen += after.version > before.version
    report.send((seen, updates))


@pytest.mark.parametrize("keep", [0, 3])
def test_racing_pulls_are_never_torn(keep):
    store = SharedMemoryWeightStore(manifest.manifest_of(weights(0)), keep=keep)
    store.publish(0, weights(0))
    processes.prepare()
    context = processes.context()
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    readers = [
        context.Process(target=follow, args=(store.handle, 60, theirs), daemon=True)
        for _, theirs in pipes
    ]
    for reader in readers:
        reader.start()
    for report, theirs in pipes:
        theirs.close()
        assert report.poll(60), "did not come up"
        report.recv()
    pace = [0.0, 0.0, 0.0, 0.004]  # bursts that overtake readers, then a breath
    made = [weights(version) for version in range(61)]
    for version in range(1, 61):
        store.publish(version, made[version])
        time.sleep(pace[version % 4])
    for reader, (report, _) in zip(readers, pipes, strict=True):
        assert report.poll(60), "a reader died"
        seen, updates = report.recv()
        assert seen > 1
        assert bool(updates) == bool(keep)
        reader.join()
        assert reader.exitcode == 0
    store.close()


def test_closing_frees_the_memory_and_readers_keep_theirs(store):
    reader = store.handle.open()
    store.publish(1, tensors(1))
    store.close()
    store.close()  # again is nothing
    assert not (shared_memory.DIRECTORY / store.handle.name).exists()
    assert install(reader, tensors(-1)).version == 1
    with pytest.raises(FileNotFoundError):
        store.handle.open()


def test_a_publication_that_ends_after_the_store_is_closed_leaves_nothing(delta):
    delta.publish(1, weights(1))
    begun = delta.begin(weights(2))
    delta.close()
    delta.finish(2, begun)
    assert not list(shared_memory.DIRECTORY.glob(f"{delta.handle.name}*"))
