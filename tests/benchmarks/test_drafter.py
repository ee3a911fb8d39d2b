"""`bench drafter`: the replay says what an engine would do, and a side is told what it made."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import drafter
from benchmarks.peers.process import Peer
from benchmarks.rollouts.lockstep import num_accepted, replay, total
from benchmarks.rollouts.recorded import Rollout, batches, load, save
from rhymeflow.errors import UserError


def rollout(row: int, epoch: int, sample: int, tokens: list[int], **more: object) -> Rollout:
    known = {"version": epoch, "noise_epoch": epoch, "group": 10 * epoch + row, "reward": 0.5}
    return Rollout(
        **{**known, **more}, row=row, epoch=epoch, sample=sample, prompt=[90, row], tokens=tokens
    )


class Oracle:
    """A side that drafts what comes, as far as `most`, and then something wrong."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.told: list[list[int]] = []
        self.ended: list[int] = []
        self.finished = 0

    def begin(self, rollouts: Sequence[Rollout], first: Sequence[list[int]]) -> None:
        self.rollouts = rollouts
        self.told = [list(tokens) for tokens in first]

    def propose(self, running: list[int], room: list[int]) -> list[tuple[list[int], list[int]]]:
        drafts = []
        for sequence, most in zip(running, room, strict=True):
            done = len(self.told[sequence])
            tokens = [*self.rollouts[sequence].tokens[done : done + self.most], -1][:most]
            drafts.append((tokens, list(range(-1, len(tokens) - 1))))
        return drafts

    def extend(self, running: list[int], made: list[list[int]]) -> None:
        for sequence, tokens in zip(running, made, strict=True):
            self.told[sequence] += tokens

    def end(self, sequence: int) -> None:
        self.ended.append(sequence)

    def finish(self, rollouts: Sequence[Rollout]) -> None:
        assert self.told == [one.tokens for one in rollouts]
        assert sorted(self.ended) == list(range(len(rollouts)))
        self.ended = []
        self.finished += 1


def test_a_step_makes_what_was_accepted_and_one_more() -> None:
    side = Oracle(most=2)
    (count,) = replay(side, [[rollout(0, 0, 0, [1, 2, 3, 4, 5, 6])]], limit=100)
    # The first token is given. 2 3 4, of which two were drafted; then 5 6, both drafted.
    assert (count.steps, count.generated, count.accepted) == (2, 5, 4)
    assert (count.drafted, len(count.iteration_seconds)) == (6, 2)
    assert side.finished == 1


def test_drafts_stop_short_of_the_limit() -> None:
    (count,) = replay(Oracle(most=9), [[rollout(0, 0, 0, [1, 2, 3, 4])]], limit=4)
    assert count.drafted == 2
    assert (count.steps, count.generated) == (1, 3)


def test_counts_are_by_epoch_and_batches_do_not_mix_them() -> None:
    rollouts = [rollout(row, epoch, 0, [1, 2, 3]) for epoch in (0, 1) for row in range(3)]
    found = batches(rollouts, groups=2)
    assert [len(batch) for batch in found] == [2, 1, 2, 1]
    side = Oracle(most=0)
    counts = replay(side, found, limit=10)
    assert [(count.epoch, count.steps) for count in counts] == [(0, 6), (1, 6)]
    assert total(counts).generated == 12
    assert total(counts[1:]).generated == 6
    assert side.finished == 4


def test_members_of_a_group_stay_together() -> None:
    rollouts = [rollout(row, 0, sample, [1, 2]) for row in range(3) for sample in range(2)]
    assert [len(batch) for batch in batches(rollouts, groups=2)] == [4, 2]


def test_broken_off_after_some_iterations() -> None:
    side = Oracle(most=0)
    side.finish = lambda rollouts: None  # type: ignore[method-assign]
    (count,) = replay(side, [[rollout(0, 0, 0, list(range(50)))]], limit=100, iterations=7)
    assert len(count.iteration_seconds) == 7
    assert side.ended == [0]


@given(st.data())
def test_accepted_is_the_longest_path_that_the_target_takes(data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, 2), max_size=8))
    parents = [data.draw(st.integers(-1, place - 1)) for place in range(len(tokens))]
    # As drafts are: one token is not twice the child of one parent.
    keep = [
        place
        for place in range(len(tokens))
        if (parents[place], tokens[place]) not in list(zip(parents, tokens, strict=True))[:place]
    ]
    if len(keep) < len(tokens):
        return
    target = data.draw(st.lists(st.integers(0, 2), max_size=6))
    position = data.draw(st.integers(0, len(target)))

    def path(node: int) -> list[int]:
        return [] if node < 0 else [*path(parents[node]), tokens[node]]

    expected = max(
        (
            len(path(node))
            for node in range(len(tokens))
            if path(node) == target[position : position + len(path(node))]
        ),
        default=0,
    )
    assert num_accepted(tokens, parents, target, position) == expected


def test_saved_rollouts_are_loaded_equal(tmp_path: Path) -> None:
    rollouts = [rollout(0, 0, 0, [1, 2], reward=0.25), rollout(1, 0, 0, [3])]
    save(tmp_path / "some.npz", rollouts)
    assert load(tmp_path / "some.npz") == rollouts


def text(row: int) -> list[int]:
    return [row * 100 + place for place in range(30)]


def test_history_is_drafted_from_the_second_epoch_on() -> None:
    rollouts = [rollout(row, epoch, 0, text(row)) for epoch in range(2) for row in range(2)]
    side = drafter.Replayed(rollouts, max_draft=8, shape="linear")
    first, second = replay(side, batches(rollouts, 2), limit=64)
    assert first.accepted == 0
    assert second.accepted > 0.7 * second.generated


def test_unknown_part_is_said() -> None:
    with pytest.raises(UserError, match="no part 'sped'; there are accepted"):
        drafter.run(argparse.Namespace(parts="sped"))


def test_parts_fill_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "demo.npz"
    save(path, [rollout(row, epoch, 0, text(row)) for epoch in range(2) for row in range(2)])
    monkeypatch.setattr("benchmarks.rollouts.record.recording", lambda name, folder: path)
    result = drafter.run(argparse.Namespace(parts="accepted", recordings="demo", runs=tmp_path))
    assert [row["draft"] for row in result["rows"]] == [
        f"{shape} {size}" for shape in ("linear", "tree") for size in (4, 8, 16)
    ]
    for row in result["rows"]:
        by_epoch = [float(value) for value in row["accepted/step by epoch"].split()]
        assert by_epoch[0] == 0
        assert by_epoch[1] == pytest.approx(row["accepted/step"], abs=0.01)
        assert row["accepted/step"] > 0


def test_latency_is_of_iterations_and_has_its_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"WIDTH": 8, "SAMPLES": 4, "HISTORY_TOKENS": 64, "ITERATIONS": 3}
    for name, value in small.items():
        monkeypatch.setattr(drafter, name, value)
    result = drafter.run(argparse.Namespace(parts="latency"))
    assert [(row["recording"], row["runs"]) for row in result["rows"]] == [
        ("4 prompts", 3), ("8 prompts", 3),
    ]  # fmt: skip
    assert [target["value"] for target in result["targets"]] == [
        pytest.approx(row["median"], abs=1e-4) for row in result["rows"]
    ]


def test_a_peer_is_stopped_while_others_are_measured(tmp_path: Path) -> None:
    script = tmp_path / "peer.py"
    script.write_text(
        "import sys\nprint('answer:{}', flush=True)\n"
        "for line in sys.stdin: print('noise', flush=True); print('answer:' + line, flush=True)"
    )
    with closing(Peer(sys.executable, [str(script)])) as peer:
        assert peer.ask({"a": 1}) == {"a": 1}
        stat = Path(f"/proc/{peer._process.pid}/stat")
        deadline = time.monotonic() + 10
        while (state := stat.read_text().rpartition(")")[2].split()[0]) != "T":
            assert time.monotonic() < deadline, state
            time.sleep(0.01)
        assert peer.ask({"b": 2}) == {"b": 2}


def test_a_peer_that_cannot_start_is_said(tmp_path: Path) -> None:
    script = tmp_path / "peer.py"
    script.write_text("import nothing_of_the_name")
    with pytest.raises(UserError, match=r"python.*No module named 'nothing_of_the_name'"):
        Peer(sys.executable, [str(script)])
