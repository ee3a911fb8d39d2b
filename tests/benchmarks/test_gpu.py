"""The parts of `bench gpu` that a CPU can do, tiny: their code runs, and their checks hold."""

import argparse
import gzip
import json
import subprocess
from types import SimpleNamespace

import pytest

from benchmarks import gpu
from benchmarks.faults.run import Finished
from benchmarks.gpus import device, exchange, policy, runs
from tests.processes import Command


@pytest.fixture
def args(tmp_path):
    (tmp_path / "folder").mkdir()
    return argparse.Namespace(
        model="random:tiny", device="cpu", folder=str(tmp_path / "folder"), output=str(tmp_path),
        part=None, minutes=None, json=True, record=False,
    )  # fmt: skip


def results(part, args) -> dict[str, object]:
    found = [[*each, *["", True][len(each) - 2 :]] for each in part(args)]
    assert [each for each in found if not each[3]] == []
    assert all(each[1] is not None for each in found)
    return {each[0]: each[1] for each in found}


@pytest.mark.parametrize(
    ("part", "some"),
    [
        (device.machine, "two ranks add up 0.1 MB by gloo: GB/s"),
        (device.draws, "68 rows: GB beside the logits"),
        (device.hashes, "hash as the CPU's"),
        (device.weights, "pull, 1% changed: s"),
        (device.head, "64 rows, forward and backward: ms"),
        (policy.steps, "step 3: mismatch_kl"),
        (policy.native, "tiny, 1 requests with drafts: tokens/s"),
        (runs.marked, "pytest -m gpu"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_part_runs_and_its_checks_hold(part, some, args, monkeypatch, tmp_path):
    class Rank(Command):
        def __init__(self, command, **_):
            super().__init__(*command[3:], cwd=tmp_path, module=command[2])

        def communicate(self):
            self.returncode = self.wait()
            return (self.output,)

    ranks = SimpleNamespace(Popen=Rank, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(exchange, "subprocess", ranks)
    assert some in results(part, args)


def test_the_learner_is_tried_with_and_without_recomputation(args):
    found = results(policy.speed, args)
    for full in (8192, 16384):
        for again in ("true", "false"):
            assert f"sdpa, {full}, recomputed: {again}: GB rise" in found


def test_traces_can_be_read(args, tmp_path):
    assert f"{tmp_path}/learner.json.gz: waits for the GPU" in results(policy.traces, args)
    for name in ("decode", "learner"):
        with gzip.open(tmp_path / f"{name}.json.gz") as file:
            assert json.load(file)["traceEvents"]


def test_what_the_audit_finds_is_said_and_a_run_is_of_one_rank_and_two(args, monkeypatch):
    broken = Finished([], ["law 2: lost"], 0, 0.0, 0)
    monkeypatch.setattr(runs, "run_with_faults", lambda config, plan: broken)
    said = [*runs.whole_run(args, {"learner.max_steps": "1"})]
    assert said[0][1:] == ("law 2: lost", "all laws hold", False)
    whole = lambda args, fields: iter([(fields["learner.num_ranks"], 0.0)])  # noqa: E731
    monkeypatch.setattr(runs, "whole_run", whole)
    assert [*results(runs.ranks, args)] == ["1", "2"]


def test_ranks_that_fail_are_said(monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho no device $CUDA_VISIBLE_DEVICES\nexit 1\n")
    program.chmod(0o700)
    monkeypatch.setattr(exchange.sys, "executable", str(program))
    monkeypatch.setattr(exchange.gpus, "visible", lambda: ("4", "GPU-a", "7"))
    said = "no device 4; NCCL_DEBUG=INFO says more"
    assert exchange.exchange("cuda", 4_000_000) == ("two ranks add up 4.0 MB by NCCL", said, False)


def test_nothing_stops_at_a_failure_and_failures_are_listed(args, monkeypatch, capsys):
    """Each part in a process of its own: one fails, one takes too long, and one cannot be done."""
    monkeypatch.setitem(gpu.PARTS, "1e", ("slow", 0, "device:weights"))
    sides = {"2b": ("cpu", "random:none"), "1e": ("cpu", "random:tiny"), "1a": ("cuda", None)}
    measure = gpu.measure

    def with_side(name, limit, args):
        args.device, args.model = sides[name]
        return measure(name, limit, args)

    monkeypatch.setattr(gpu, "measure", with_side)
    args.part = list(sides)
    gpu.run(args)
    lines = capsys.readouterr().out.splitlines()
    states = [json.loads(line)["state"] for line in lines[:3]]
    assert states[0].startswith("failed (1): FileNotFoundError")
    assert states[1] == "ended after 0 s"
    assert states[2].startswith(("skipped: no GPU", "done"))
    where = lines.index("2 failures")
    assert lines[where + 1].startswith("2b the learner's head: failed (1): ")
    assert lines[where + 2] == "1e slow: ended after 0 s"
